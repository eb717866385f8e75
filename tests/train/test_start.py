"""Runs that begin with a trained network, and whose levels learn from it."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from internals import Checkpoints, Output, Reporter, Run, train
from test_joint import WORDS
from test_resume import SHORT

import elsa_format
from elsa_train import (
    Network,
    Scope,
    divergence,
    load_counters,
    masked,
    nest,
    parse_levels,
    read_recipe,
    write_file,
)

LEVELS = ["--levels", "90,80", "--distill", "--start-masks", "calibrated"]


def invoke(*words):
    return CliRunner().invoke(train, [*WORDS, *words])


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """The folder of a run, and its dense network as a plain file."""
    folder = tmp_path_factory.mktemp("dense")
    found = invoke("-o", str(folder / "run"), "--epochs", "8")
    assert (found.exit_code, found.output) == (0, "")
    with elsa_format.open(folder / "run" / "seed-0" / "model.safetensors") as file:
        np.savez(folder / "dense.npz", **file.load("dense"))
    return folder


@pytest.fixture(scope="module")
def tuned(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    found = invoke("-o", str(folder), "--start", str(dense / "dense.npz"), *LEVELS)
    assert (found.exit_code, found.output) == (0, "")
    return folder


def test_calibrated_levels_are_trained_further(dense, tuned, tmp_path):
    with elsa_format.open(tuned / "seed-0" / "model.safetensors") as file:
        assert [level.name for level in file.levels] == ["90%", "80%"]
        settings = json.loads(file.metadata["elsa_train"])
    assert settings["distill"]
    assert "start" not in settings  # a place; what was there is
    assert len(settings["start_checksum"]) == 64
    untrained = ["--learning-rate", "1e-9", "--start", str(dense / "dense.npz"), *LEVELS]
    assert invoke("-o", str(tmp_path), *untrained).exit_code == 0
    files = [folder / "seed-0" / "model.safetensors" for folder in (tmp_path, tuned)]
    before, after = (elsa_format.open(path).levels[0] for path in files)
    assert after.nonzero == before.nonzero
    assert after.metrics["loss"] < before.metrics["loss"]
    path = str(tuned / "seed-0" / "model.safetensors")
    found = CliRunner().invoke(train, ["evaluate", path, "--level", "1", "--json"])
    assert found.exit_code == 0, found.output


def test_a_run_that_was_killed_calibrates_once_and_ends_with_the_same_bytes(
    dense, tuned, tmp_path, monkeypatch
):
    save = Checkpoints.save

    def die(self, progress, phase=None):
        save(self, progress, phase)
        if phase and phase.step == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", die)
    words = ["-o", str(tmp_path), "--start", str(dense / "dense.npz"), *LEVELS]
    assert invoke(*words).exit_code == 130
    monkeypatch.setattr(Checkpoints, "save", save)
    monkeypatch.setattr("elsa_train._calibrate.calibrate", None)
    found = invoke(*words)
    assert found.exit_code == 0, found.output
    one, other = (folder / "seed-0" / "model.safetensors" for folder in (tmp_path, tuned))
    assert one.read_bytes() == other.read_bytes()


def test_a_run_and_its_file_are_the_same_start(dense, tmp_path):
    starts = [dense / "run", dense / "run" / "seed-0" / "model.safetensors", dense / "dense.npz"]
    found = set()
    for start in starts:
        recipe = read_recipe("digits", {**SHORT, "start": str(start)})
        found.add(Run(recipe, 0, Output(tmp_path), Reporter(None)).settings["start_checksum"])
    assert len(found) == 1


def test_another_start_is_another_run(dense, tuned):
    with np.load(dense / "dense.npz") as file:
        arrays = {name: array + 1e-3 for name, array in file.items()}
    np.savez(dense / "other.npz", **arrays)
    found = invoke("-o", str(tuned), "--start", str(dense / "other.npz"), *LEVELS)
    assert found.exit_code == 2
    assert "start_checksum was" in found.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--distill"], "distill and start_masks need start, and method 'joint'"),
        (["--start", "missing.npz"], "missing.npz"),
        (["--start", "DENSE", "--width", "16"], "start: .*found shape"),
        (["--start", "DENSE", *LEVELS, "--prune", "."], "can't be calibrated"),
    ],
)
def test_what_is_refused(words, message, dense, tmp_path):
    given = [str(dense / "dense.npz") if word == "DENSE" else word for word in words]
    found = invoke("-o", str(tmp_path / "run"), *given)
    assert found.exit_code
    assert re.search(message, found.output), found.output


def test_own_loops(tmp_path):
    """Of a packed file: counters, the divergence, and the file of what was trained."""
    params = {"kernel": jax.random.normal(jax.random.key(0), (16, 8)), "bias": jnp.zeros(8)}
    arrays = {name: np.asarray(leaf) for name, leaf in params.items()}
    elsa_format.pack(arrays, tmp_path / "net.safetensors", sparsities=[75, 50])
    n = load_counters(tmp_path / "net.safetensors", like=params)
    assert int(jnp.sum(n["kernel"] == 1)) == 32
    assert int(jnp.sum(n["bias"])) == 8
    x = jax.random.normal(jax.random.key(1), (64, 16))

    def answers(params):
        return x @ params["kernel"] + params["bias"]

    def loss(trained):
        return sum(divergence(answers(masked(trained, n, t)), answers(params)) for t in (1, 2, 0))

    tuned, before = params, loss(params)
    for _ in range(20):
        tuned = jax.tree.map(lambda p, g: p - 0.3 * g, tuned, jax.grad(loss)(tuned))
    assert loss(tuned) < 0.8 * before
    result = nest(Network(tuned), n, parse_levels("75,50"), scope=Scope())
    write_file(tmp_path / "tuned.safetensors", result)
    with elsa_format.open(tmp_path / "tuned.safetensors") as file:
        assert [level.nonzero for level in file.levels] == [32 + 8, 64 + 8]
