"""What a run promises: budgets that are met, a dense network no worse, nothing chosen on tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny
from internals import (
    BadRecipe,
    InfeasibleTraining,
    MissedBudget,
    Output,
    Plan,
    Reporter,
    Run,
    apply_mask,
    cells,
    check_level,
    count_nonzero,
    markdown,
    run_seed,
    whole,
)

from elsa_train import Level, Network, Pruner, Schedule, Scope

LEVEL = Level("1%", 0.01)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(tiny(levels="1%"), 0, Output(tmp_path_factory.mktemp("run")), Reporter())


def test_weights_behind_a_silent_channel_are_drawn_anew(run):
    trainer = run.trainer
    network = trainer.init()
    params = jax.tree.map(np.array, network.params)
    n = jax.tree.map(lambda p: np.zeros(p.shape, np.uint8), params)
    params["conv2"]["kernel"][..., :3] = 0
    params["norm2"]["bias"][:3] = -9
    n["norm2"]["bias"][:3] = 1
    plan = Plan(3, "sparsify 1%", 4, 0.01, 0, Pruner(run.scope, LEVEL, Schedule(0, 3, 2)))
    assert plan.revives_at == 2
    start = trainer.start(Network(trainer.replicate(params), network.state))
    reached = [
        trainer.run(plan, start._replace(carry=jax.tree.map(jnp.copy, start.carry)), n, *IGNORE)
        for _ in (1, 2)
    ]
    kept = [reached.network.params["conv2"]["kernel"][..., :3] for reached in reached]
    assert np.array_equal(*kept)
    assert np.count_nonzero(kept[0]) > 0.9 * kept[0].size
    check_level(LEVEL, reached[0].network.params, run.scope, n)
    silent = plan.__class__(3, "train", 4, 0.01, 0)
    network = trainer.run(silent, start, n, *IGNORE).network
    assert not np.any(network.params["conv2"]["kernel"][..., :3])
    with pytest.raises(MissedBudget, match=r"level 1%: has \d+ nonzero prunable weights, expected"):
        check_level(LEVEL, network.params, run.scope, n)


IGNORE = (lambda report: None, lambda plan, phase: None)


def test_a_masked_weight_gathers_no_momentum(run):
    """Else it would leap when a rule lets it in again."""
    trainer = run.trainer
    network = trainer.init()
    n = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.uint8), network.params)
    kept = jax.tree.map(lambda p: jnp.arange(p.size).reshape(p.shape) % 2 == 0, network.params)
    start = trainer.start(network._replace(params=apply_mask(network.params, kept)))
    phase = start._replace(kept=trainer.replicate(kept))
    reached = trainer.run(Plan(3, "train", 4, 0.01, 0), phase, n, *IGNORE)
    for average, mask in zip(
        jax.tree.leaves(optax.tree.get(reached.carry.optimizer, "trace")),
        jax.tree.leaves(kept),
        strict=True,
    ):
        assert not np.any(average[~mask])
        assert np.any(average[mask] != 0)


def test_dense_is_the_last_level_if_that_is_better_on_held_out_images(run, monkeypatch):
    asked = []

    def evaluate(network, part="test"):
        asked.append(part)
        return {"accuracy": {"sparse": 0.9, "worse": 0.8, "equal": 0.9, "better": 0.95}[network]}

    monkeypatch.setattr(run.trainer, "evaluate", evaluate)
    assert run.choose("sparse", "worse") == "sparse"
    assert run.choose("sparse", "equal") == "equal"
    assert run.choose("sparse", "better") == "better"
    assert set(asked) == {"validation"}


def test_the_last_densification_has_a_rate_of_its_own(run, tmp_path):
    recipe = dataclasses.replace(
        run.recipe, levels="5%,1%", densify_factor=1, densify_between_factor=0.25
    )
    plans = Run(recipe, 0, Output(tmp_path), run.reporter).plans.sequential()
    peak = plans[0].peak
    assert [plans[number].peak for number in (1, 2, 3, 4)] == [peak, peak / 4, peak, peak]


def test_levels_are_judged_without_the_test_images_where_that_is_asked_for(run, tmp_path):
    recipe = dataclasses.replace(run.recipe, judge="validation")
    judged = Run(recipe, 0, Output(tmp_path, 500), run.reporter)
    network = judged.trainer.init()
    assert judged.trainer.evaluate(network) == run.trainer.evaluate(network, "validation")
    assert judged.trainer.evaluate(network) != run.trainer.evaluate(network)
    with pytest.raises(BadRecipe, match="nothing is held out"):
        dataclasses.replace(recipe, validation=0.0)


def test_the_zeros_of_a_dense_network_that_is_the_last_level_are_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "choose", lambda run, sparse, dense: sparse)
    small = tiny(levels="50", epochs=0.5, sparsify_epochs=0.5)
    last, dense = run_seed(small, 0, Output(tmp_path), Reporter())
    assert (dense.sparsity, dense.nonzero) == (last.sparsity, last.nonzero)
    assert 0.3 < dense.sparsity < 0.6
    assert f"| dense | {dense.sparsity:.4%} |" in markdown(cells([[last, dense]]))


def test_what_is_held_out_is_never_trained_on_and_the_same_for_every_seed(run, tmp_path):
    other = Run(tiny(levels="1%"), 1, Output(tmp_path), Reporter()).trainer
    held = run.trainer.batches.indices["validation"]
    assert np.array_equal(held, other.batches.indices["validation"])
    assert len(held) == run.trainer.batches.size("validation") == 72
    assert len(held) + run.trainer.batches.size("train") == 1437
    seen = []
    batch = run.trainer.data.batch

    class Watching(type(run.trainer.data)):
        def batch(self, split, indices, seed):
            seen.extend(indices if split == "train" else ())
            return batch(split, indices, seed)

    other.batches.data = Watching(**vars(other.data))
    with other.batches.phase(0, 2 * other.batches.per_epoch) as batches:
        assert len(list(batches)) == 2 * other.batches.per_epoch
    assert len(seen) > 1000
    assert not set(seen) & set(held)


def test_initial_weights_are_compiled_once(run):
    first, second = run.trainer.init(), run.trainer.init()
    assert all(map(np.array_equal, jax.tree.leaves(first), jax.tree.leaves(second)))
    assert run.trainer.draw._cache_size() == 1
    assert sum(map(whole, count_nonzero(first.params))) > 0


def test_a_pruner_without_anything_to_prune_says_so():
    pruner = Pruner(Scope(prune="nothing"), LEVEL, Schedule(0, 0, 1))
    params = {"kernel": jnp.ones(4)}
    with pytest.raises(InfeasibleTraining, match="no tensor matches prune='nothing'"):
        pruner.mask(params, None, {"kernel": jnp.zeros(4)}, 0)
