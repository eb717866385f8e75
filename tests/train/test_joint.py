"""Joint training: nested rankings, levels trained by the step, and a run that resumes."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from internals import DENSE, Checkpoints, InfeasibleTraining, sparse, train, usual_shares
from test_resume import ARGUMENTS

import elsa_format
from elsa_train import (
    Joint,
    Level,
    Network,
    Schedule,
    Scope,
    masked,
    nest,
    parse_levels,
    write_file,
)

WORDS = ["digits", *ARGUMENTS, "--method", "joint", "--train-images", "448", "--plot", "none"]
WORDS += ["--joint-every", "3", "--checkpoint-every", "5", "-q"]
PARAMS = {
    "conv": {"kernel": jax.random.normal(jax.random.key(0), (3, 4, 16))},
    "head": {"kernel": jax.random.normal(jax.random.key(1), (16, 8)), "bias": jnp.zeros(8)},
}


@pytest.mark.parametrize(
    ("scope", "levels"),
    [("global", "95,90,50"), ("uniform", "95,90,50"), ("nm", "1:8,1:4,2:4")],
)
def test_each_level_has_its_budget_and_those_before_it(scope, levels):
    chosen = Scope(scope)
    joint = Joint(chosen, parse_levels(levels), Schedule(10, 40, 10))
    n = joint.rank(PARAMS, step=40)
    before = 0
    for t, level in enumerate(joint.levels, 1):
        kept = [int(np.sum((leaf > 0) & (leaf <= t))) for leaf in jax.tree.leaves(n)]
        assert sum(kept) - 8 == sum(chosen.budgets(PARAMS, level)) > before
        before = sum(kept) - 8
        # Of what a level has and the one before has not, nothing is smaller than what it lacks.
        if scope == "uniform":
            kernel, counters = np.abs(PARAMS["head"]["kernel"]), np.asarray(n["head"]["kernel"])
            lacking = (counters == 0) | (counters > t)
            assert kernel[counters == t].min() >= kernel[lacking].max()
    assert np.all(np.asarray(n["head"]["bias"]) == 1)


def test_levels_part_slowly():
    joint = Joint(Scope(), parse_levels("90,50"), Schedule(10, 40, 10))
    sizes = [int(np.sum(joint.rank(PARAMS, step)["conv"]["kernel"] == 1)) for step in (20, 30, 40)]
    assert sizes == sorted(sizes, reverse=True)
    assert [step for step in range(60) if joint.updates_at(step)] == [20, 30, 40]
    assert masked(PARAMS, joint.start(PARAMS), 1)["conv"]["kernel"].all()


def test_a_level_moves_only_the_weights_it_has():
    n = Joint(Scope(), parse_levels("90,50"), Schedule(0, 0, 1)).rank(PARAMS, 0)
    for t in (1, 2, DENSE):
        grads = jax.grad(lambda p, t=t: sum(map(jnp.sum, jax.tree.leaves(masked(p, n, t)))))(PARAMS)
        for grad, counters in zip(jax.tree.leaves(grads), jax.tree.leaves(n), strict=True):
            has = (counters > 0) & (counters <= t) if t else np.ones(counters.shape, bool)
            assert np.array_equal(np.asarray(grad) == 1, has)


@pytest.mark.parametrize("levels", [1, 2, 3, 10, 50, 255])
def test_every_level_is_drawn_as_often_as_its_share_says(levels):
    shares = usual_shares(levels)
    assert len(shares) == levels + 1
    assert min(shares) > 0
    names = tuple(Level(str(t), 1 - t / 1000) for t in range(1, levels + 1))
    joint = Joint(Scope(), names, Schedule(0, 0, 1))
    first = [joint.draw(step, (7,)) for step in range(sum(shares))]
    assert [first.count(t) for t in [*range(1, levels + 1), DENSE]] == list(shares)
    assert joint.draw(3, (7,)) == first[3]
    if levels > 2:
        assert first != [joint.draw(step, (8,)) for step in range(sum(shares))]


@pytest.mark.parametrize("shares", [(1, 2), (1, 2, -1), (0, 0, 0)])
def test_shares_that_fit_no_levels_are_refused(shares):
    with pytest.raises(InfeasibleTraining, match="expected 3 whole numbers"):
        Joint(Scope(), parse_levels("90,80"), Schedule(0, 0, 1), shares)


def test_nested_levels_are_the_trained_ones_with_their_own_statistics(tmp_path):
    joint = Joint(Scope(), parse_levels("90,50"), Schedule(0, 0, 1))
    n = joint.rank(PARAMS, 0)
    network = Network(PARAMS, {"mean": jnp.zeros(())})
    result = nest(
        network,
        n,
        joint.levels,
        lambda params: {"mean": jnp.mean(params["conv"]["kernel"])},
    )
    write_file(tmp_path / "net.safetensors", result)  # compares the file with what was frozen
    with elsa_format.open(tmp_path / "net.safetensors") as file:
        for t in (1, 2):
            trained = np.asarray(sparse(PARAMS, n, t)["conv"]["kernel"])
            found = file.load(t)
            assert np.allclose(found["conv/kernel"], trained, rtol=2**-20, atol=0)
            assert found["mean"] == pytest.approx(np.mean(trained), rel=1e-4)
    kept = nest(network, n, joint.levels, choose=lambda sparse, dense: sparse)
    assert int(np.sum(kept.network.params["conv"]["kernel"] != 0)) < PARAMS["conv"]["kernel"].size


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    found = CliRunner().invoke(train, [*WORDS, "--alone", "-o", str(folder)])
    assert (found.exit_code, found.output) == (0, "")
    return folder / "seed-0"


def test_a_joint_run_resumes_to_the_same_bytes(whole, tmp_path, monkeypatch):
    save = Checkpoints.save

    def die(self, progress, phase=None):
        save(self, progress, phase)
        if phase and phase.step == 20:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoints, "save", die)
    assert CliRunner().invoke(train, [*WORDS, "-o", str(tmp_path)]).exit_code == 130
    monkeypatch.setattr(Checkpoints, "save", save)
    found = CliRunner().invoke(train, [*WORDS, "-o", str(tmp_path)])
    assert found.exit_code == 0, found.output
    again = tmp_path / "seed-0" / "model.safetensors"
    assert again.read_bytes() == (whole / "model.safetensors").read_bytes()


def test_references_of_a_joint_run_are_trained_alone(whole, tmp_path):
    rows = json.loads((whole / "results.json").read_text())["rows"]
    assert [row["level"] for row in rows] == ["90%", "80%", "dense"]
    assert all(0 <= row["alone"] <= 1 for row in rows)
    found = CliRunner().invoke(train, [*WORDS, "--reference", "-o", str(tmp_path / "x")])
    assert found.exit_code == 2
    assert "--alone" in found.output
    assert not (tmp_path / "x").exists()


def test_curves_of_all_levels(whole):
    from internals import read_curves

    curves = read_curves((whole / "metrics.jsonl").read_text().splitlines())
    assert curves.keys() == {"90%", "80%", "dense"}
