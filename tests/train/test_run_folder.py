"""A run folder that is cut, changed or none: one line, the right code, and nothing is executed."""

import dataclasses
import json
import os
import shutil

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from internals import Trainer, _record, _run, keep_all, replacing, train, without_state
from PIL import Image
from test_resume import ARGUMENTS

from elsa_train import FrozenLevel, Scope, parse_levels
from elsa_train.data import load
from elsa_train.data.protocol import identity_of

WORDS = ["digits", *ARGUMENTS, "--levels", "80", "--plot", "none", "--train-images", "128"]
WORDS += ["--checkpoint-every", "1"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    found = CliRunner().invoke(train, [*WORDS, "-o", str(folder), "-q", "--json"])
    assert found.exit_code == 0, found.output
    answer = json.loads(found.stdout)
    assert found.stderr == ""
    assert answer["output"] == str(folder)
    assert answer["runs"][0]["seed"] == 0
    assert answer["runs"][0]["model"] == str(folder / "seed-0" / "model.safetensors")
    assert [row["level"] for row in answer["runs"][0]["levels"]] == ["80%", "dense"]
    return folder / "seed-0"


@pytest.fixture
def folder(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run" / "seed-0")


def again(folder, *more):
    found = CliRunner().invoke(train, [*WORDS, "-o", str(folder.parent), "-q", *more])
    assert "Traceback" not in found.output
    if found.exit_code:
        assert isinstance(found.exception, SystemExit)
        assert found.output.startswith("error: ")
        assert found.output.count("\n") == 1, found.output
    return found


def files(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "7",
        lambda text: "{}",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"elsa"', '"other"'),
        lambda text: text.replace('"80%"', '"70%"'),
        lambda text: text.replace('"nonzero": ', '"nonzero": NaN, "x": '),
        lambda text: text.replace('"sparsity": ', '"sparsity": "a", "y": '),
        lambda text: json.dumps({**json.loads(text), "rows": [None]}),
        lambda text: json.dumps({**json.loads(text), "rows": 5}),
        lambda text: json.dumps({**json.loads(text), "seconds": 10**400}),
    ],
)
def test_results_that_no_run_wrote(folder, change):
    path = folder / "results.json"
    path.write_text(change(path.read_text()))
    before = files(folder)
    found = again(folder)
    assert found.exit_code == 3
    assert "results.json: cut, or not of a run" in found.output
    assert files(folder) == before


def test_settings_in_the_folder_name_no_code(folder):
    path = folder / "results.json"
    found = json.loads(path.read_text())
    found["settings"] |= {"dataset": "os:system", "data_dir": f"touch {folder}/stolen"}
    path.write_text(json.dumps(found))
    assert again(folder).exit_code == 2
    path.unlink()
    for meta in folder.glob("checkpoints/*/meta/metadata"):
        entry = json.loads(meta.read_text())
        entry["settings"] |= {"dataset": "os:system", "data_dir": f"touch {folder}/stolen"}
        meta.write_text(json.dumps(entry))
    refused = again(folder)
    assert refused.exit_code == 2
    assert "other settings" in refused.output
    assert not (folder / "stolen").exists()


def write_images(root, value):
    for split in ("train", "val"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(2):
                image = Image.new("RGB", (8, 8), (value, number, 0))
                image.save(root / split / name / f"{number}.png")


def test_data_is_known_again_wherever_it_is(tmp_path):
    for name in ("one", "two", "other"):
        write_images(tmp_path / name, 7)
    larger = Image.effect_noise((16, 16), 9)
    larger.save(tmp_path / "other" / "train" / "a" / "0.png")
    one, two, other = (load("imagefolder", tmp_path / n) for n in ("one", "two", "other"))
    assert identity_of(one) == identity_of(two)
    assert identity_of(one) != identity_of(other)
    (tmp_path / "two" / "train" / "a" / "0.png").rename(tmp_path / "two" / "train" / "a" / "9.png")
    assert identity_of(load("imagefolder", tmp_path / "two")) != identity_of(one)
    digits = load("digits", "")
    images, labels = digits.train
    changed = dataclasses.replace(digits, train=(images, np.roll(labels, 1)))
    assert identity_of(changed) != identity_of(digits)

    class Own:  # without an identity: some of it is looked at
        def __init__(self, data):
            self.size, self.shape, self.batch = data.size, data.shape, data.batch
            self.num_classes = data.num_classes

    assert identity_of(Own(digits)) == identity_of(Own(load("digits", "")))
    assert identity_of(Own(digits)) != identity_of(Own(changed))


def test_a_run_is_not_resumed_on_changed_data_unless_asked(folder, monkeypatch):
    before = files(folder)
    # Where the data is does not matter, what it is does.
    assert again(folder, "--data-dir", "moved").exit_code == 0
    assert files(folder) == before
    images, labels = load("digits", "").train
    changed = dataclasses.replace(load("digits", ""), train=(images, np.roll(labels, 1)))
    monkeypatch.setattr(_run, "load", lambda name, source: changed)
    assert "holds a run on other data (data_sha256 was" in again(folder).output
    unfinish(folder)
    refused = again(folder)
    assert refused.exit_code == 2
    assert "or --changed-data to resume, or --force to start over" in refused.output
    assert again(folder, "--changed-data").exit_code == 0
    assert (folder / "model.safetensors").exists()


def test_a_run_of_an_earlier_version_that_does_not_know_its_data_is_left_alone(folder):
    path = folder / "results.json"
    found = json.loads(path.read_text())
    assert found["settings"].pop("data_sha256")
    assert found["settings"].pop("data_examples") == [1437, 360]
    path.write_text(json.dumps(found))
    assert again(folder).exit_code == 0


def unfinish(folder):
    (folder / "results.json").unlink()
    (folder / "model.safetensors").unlink()
    return max(folder.glob("checkpoints/[0-9]*"), key=lambda path: int(path.name))


@pytest.mark.parametrize(
    "change",
    [
        {"done": 99},
        {"done": "2"},
        {"done": -7},
        {"step": 10**12},
        {"step": "x"},
        {"frozen": []},
        {"frozen": [{}]},
        {"settings": None},
    ],
    ids=str,
)
def test_checkpoints_that_no_run_wrote(folder, change):
    meta = unfinish(folder) / "meta" / "metadata"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
    found = again(folder)
    assert found.exit_code == (2 if "settings" in change else 3)
    assert "--force" in found.output
    assert not (folder / "model.safetensors").exists()


def test_cut_checkpoints(folder):
    last = unfinish(folder)
    for path in sorted(last.rglob("*"), key=lambda path: -len(path.parts)):
        if path.is_file() and "arrays" in path.parts:
            path.write_bytes(path.read_bytes()[:10])
    found = again(folder)
    assert found.exit_code == 3
    assert "--force starts over" in found.output


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04nothing", None, "npy", "pickle", "wrong", "infinite"],
    ids=["empty", "cut", "half", "npy", "pickle", "wrong", "infinite"],
)
def test_an_initial_network_that_no_run_wrote(folder, content):
    unfinish(folder)
    path = folder / "initial.npz"
    if content is None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        arrays = dict(np.load(path))
        name = min(arrays)
        value = arrays[name]
        with path.open("wb") as file:
            if content == "npy":
                np.save(file, value)
            elif content == "pickle":
                np.savez(file, **{**arrays, name: np.array([Touch(folder)], object)})
            elif content == "wrong":
                np.savez(file, **{**arrays, name: value.astype(np.int8)})
            else:
                np.savez(file, **{**arrays, name: np.full_like(value, np.inf)})
    found = again(folder)
    assert found.exit_code == 3
    assert "initial.npz: cut, or not of a run" in found.output
    assert not (folder / "stolen").exists()


class Touch:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, folder):
        self.path = str(folder / "stolen")

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_references_that_no_run_wrote(folder):
    for text in ("{", '{"reference 80%": "good"}', '{"reference 80%": NaN}', "[1]"):
        (folder / "references.json").write_text(text)
        found = again(folder, "--reference")
        assert found.exit_code == 3
        assert "references.json" in found.output


@pytest.mark.parametrize(("factor", "code"), [(1 + 3e-9, 0), (1.005, 0), (1.02, 1)])
def test_metrics_of_a_resumed_run_are_close_bits_are_equal(folder, factor, code, monkeypatch):
    """Other devices take the sums of a loss in another order; a wrong network is far off."""
    unfinish(folder)
    evaluate = Trainer.evaluate

    def elsewhere(self, *words):
        found = evaluate(self, *words)
        return {**found, "loss": found["loss"] * factor}

    monkeypatch.setattr(Trainer, "evaluate", elsewhere)
    found = again(folder)
    assert found.exit_code == code, found.output
    assert ("level 1 measures" in found.output) == bool(code)


def rank_all_first(scope, params, *_):
    return jax.tree.map(lambda kept: kept.astype("u1"), keep_all(params))


@pytest.mark.parametrize("column", ["--reference", "--equal-epochs", "--alone"])
def test_a_reference_that_misses_its_sparsity_is_refused(folder, column, monkeypatch):
    """Compared at another sparsity than the level's, it would say nothing."""
    monkeypatch.setattr(Scope, "select", lambda self, scores, n, *_, **__: keep_all(n))
    monkeypatch.setattr(Scope, "rank", rank_all_first)
    found = again(folder, column)
    assert found.exit_code == 1
    assert "level 80%: has " in found.output
    assert not (folder / "references.json").exists()


def test_a_cut_line_of_metrics_is_dropped(folder):
    path = folder / "metrics.jsonl"
    unfinish(folder)
    path.write_text(path.read_text() + '{"phase": "den')
    assert again(folder).exit_code == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1]["measured"] == "dense"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_text(""), "Not a directory"),
        (lambda path: path.symlink_to(path), "Too many levels"),
        (lambda path: (path.mkdir(), (path / "seed-0").write_text("")), "File exists"),
    ],
)
def test_folders_that_cannot_be_written(make, reason, tmp_path):
    make(tmp_path / "run")
    found = again(tmp_path / "run" / "seed-0")
    assert found.exit_code == 1
    assert reason in found.output


@pytest.mark.parametrize(
    "name", ["model.safetensors", "results.json", "initial.npz", "metrics.jsonl", "../table.md"]
)
def test_files_that_cannot_be_written_are_refused_before_training(folder, name, monkeypatch):
    unfinish(folder)
    path = folder / name
    path.unlink(missing_ok=True)
    path.mkdir()
    before = files(folder)
    monkeypatch.setattr(_run, "train", None)
    for more in ([], ["--force"]):  # which removes nothing then
        found = again(folder, *more)
        assert found.exit_code == 1
        assert f"{path.name}: Is a directory" in found.output
        assert files(folder) == before


def test_plots_that_cannot_be_written_are_refused_before_training(folder, monkeypatch):
    unfinish(folder)
    (folder / "curves.svg").mkdir()
    monkeypatch.setattr(_run, "train", None)
    assert "curves.svg" in again(folder, "--plot", "svg").output


def test_force_starts_over_and_removes_only_what_is_a_runs(folder):
    (folder / "notes.txt").write_text("mine")
    (folder / "results.json").write_text("{")
    before = (folder / "model.safetensors").read_bytes()
    assert again(folder, "-f").exit_code == 0
    assert (folder / "notes.txt").read_text() == "mine"
    assert json.loads((folder / "results.json").read_text())["rows"]
    assert (folder / "model.safetensors").read_bytes() == before


def test_force_keeps_the_old_run_if_the_new_one_cannot_start(folder):
    before = files(folder)
    assert again(folder, "--restart", "--batch-size", "5000").exit_code == 2
    assert files(folder) == before


def test_what_is_not_written_whole_is_not_written(tmp_path):
    path = tmp_path / "table.md"
    path.write_text("old")

    def fail():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match=r"No space left.*table\.md"):
        fail()
    assert os.listdir(tmp_path) == ["table.md"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("name", ["95%", "2:4"])
def test_a_frozen_level_survives_its_checkpoint(name):
    (level,) = parse_levels(name)
    frozen = FrozenLevel(level, 10, 0.5, {"accuracy": 0.25}, "sha256:…", ())
    entry = json.loads(json.dumps(dataclasses.asdict(without_state(frozen))))
    assert _record(entry, ()) == frozen
