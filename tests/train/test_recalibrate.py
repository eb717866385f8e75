"""`elsa-train recalibrate`: what it takes, and files that are not of the trainer."""

import io
import json

import numpy as np
import pytest
from click.testing import CliRunner
from internals import BadData, BadRecipe, UnknownModel, train

import elsa_format
from elsa_train import recalibrate
from elsa_train.data import load

GOOD = {"model": "digits", "width": 8, "dtype": "float32"}


def write(path, metadata, per_level=True):
    """Write a file with statistics for each level, of no model that exists."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(8, 8)).astype(np.float32)
    counters = np.zeros((8, 8), np.uint8)
    counters[0], counters[1] = 1, 2
    mean = np.zeros(8, np.float32)
    elsa_format.write(
        path,
        {"kernel": elsa_format.embed_counters(kernel, counters, 2), "norm/mean": mean},
        bits=2,
        levels=[elsa_format.LevelSpec("small"), elsa_format.LevelSpec("1")],
        nested=["kernel"],
        per_level={"norm/mean": [mean, mean]} if per_level else {},
        metadata={} if metadata is None else {"elsa_train": metadata},
    )
    return path


def run(*words):
    found = CliRunner().invoke(train, ["recalibrate", *map(str, words)])
    assert "Traceback" not in found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    return found


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        "",
        "{",
        "null",
        "[]",
        "7",
        "{}",
        "[" * 100_000,
        json.dumps({**GOOD, "model": "os:system"}),
        json.dumps({**GOOD, "model": ["digits"]}),
        json.dumps({**GOOD, "width": -1}),
        json.dumps({**GOOD, "width": 1e300}),
        json.dumps({**GOOD, "width": 10**30}),
        json.dumps({**GOOD, "dtype": "object"}),
        json.dumps({"model": "digits"}),
    ],
    ids=range(15),
)
def test_metadata_that_the_trainer_did_not_write(metadata, tmp_path):
    source, out = write(tmp_path / "net.safetensors", metadata), tmp_path / "out.safetensors"
    found = run(source, "--level", "1", "--dataset", "digits", "-o", out)
    assert found.exit_code == 3
    assert found.output.startswith(f"error: {source}: ")
    assert found.output.count("\n") == 1
    assert not out.exists()


def test_what_it_cannot_do_is_said(tmp_path):
    source, out = write(tmp_path / "net.safetensors", json.dumps(GOOD)), tmp_path / "out"
    words = ["--dataset", "digits", "-o", out]
    for given, code, reason in (
        ([source, "--level", "1", *words], 2, "does not fit the data set: tensor"),
        ([source, "--level", "3", *words], 2, "level '3': found small, 1"),
        ([source, "--level", "1", "--dataset", "nosuch:load", "-o", out], 2, "nosuch"),
        ([source, "--level", "1", "--dataset", "nosuch", "-o", out], 2, "none such"),
        ([source, "--level", "1", *words, "--images", "0"], 2, "--images"),
        ([tmp_path / "missing", "--level", "1", *words], 1, "No such file"),
        ([tmp_path / "net.txt", "--level", "1", *words], 3, "net.txt"),
    ):
        (tmp_path / "net.txt").write_text("nothing")
        found = run(*given)
        assert (found.exit_code, reason in found.output) == (code, True), found.output
        assert not out.exists()
    plain = write(tmp_path / "plain.safetensors", json.dumps(GOOD), per_level=False)
    found = run(plain, "--level", "1", *words)
    assert found.exit_code == 3
    assert "no per-level tensors" in found.output


def test_python_gets_the_same_errors(tmp_path):
    source = write(tmp_path / "net.safetensors", "{")
    data = load("digits")
    with pytest.raises(UnknownModel, match="elsa_train metadata"):
        recalibrate(source, tmp_path / "out", level=1, data=data)
    with pytest.raises(ValueError, match="images=0"):
        recalibrate(source, tmp_path / "out", level=1, data=data, images=0)
    with pytest.raises(BadData, match="has no 'num_classes'"):
        recalibrate(source, tmp_path / "out", level=1, data=object())
    write(tmp_path / "fits.safetensors", json.dumps(GOOD))
    with pytest.raises(BadRecipe, match="does not fit"):
        recalibrate(tmp_path / "fits.safetensors", tmp_path / "out", level=1, data=data)


@pytest.mark.parametrize(
    ("level", "number"), [("2", 2), ("90%", 2), ("95%", 1), ("dense", "dense")]
)
def test_levels_by_number_and_by_name(train_tiny, level, number, tmp_path):
    trained, _, _ = train_tiny("global", "float32")
    out = tmp_path / "out.safetensors"
    words = [trained.output.model, "-l", level, "--data", "digits", "--images", "64"]
    found = run(*words, "--out", out, "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) == {"output": str(out), "level": number}
    again = run(*words, "-o", out)
    assert again.exit_code == 1
    assert "exists" in again.output
    content = out.read_bytes()
    assert run(*words, "-o", out, "-f", "-q").output == ""
    assert out.read_bytes() == content
    piped = run(*words, "-o", "-")
    assert piped.stdout_bytes == content
    elsa_format.verify(io.BytesIO(content))
    with elsa_format.open(trained.output.model) as before, elsa_format.open(out) as after:
        for t, (old, new) in enumerate(zip(before.levels, after.levels, strict=True), 1):
            assert (old.digest == new.digest) == (t != number)
