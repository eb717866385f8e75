"""digits from data to file: every level is bit for bit, and measures, what was frozen."""

import numpy as np
import pytest
from internals import load_network

import elsa_format

SETTINGS = [
    ("global", "float32"),
    ("global", "bfloat16"),
    ("uniform", "float32"),
    ("nm", "float32"),
    ("nm", "bfloat16"),
]


def extract(source, out, level):
    """Extract as a user does."""
    from click.testing import CliRunner
    from internals import extract_command as command

    found = CliRunner().invoke(command, [str(source), "--level", str(level), "-o", str(out)])
    assert found.exit_code == 0, found.output


@pytest.mark.parametrize(("scope", "dtype"), SETTINGS)
def test_levels_extracted_from_the_file_are_those_frozen(train_tiny, scope, dtype, tmp_path):
    run, result, measured = train_tiny(scope, dtype)
    frozen = measured[1:]  # the first is the initial dense network
    for t in (1, 2, 3):
        extract(run.output.model, tmp_path / f"{t}.safetensors", t)
        found = elsa_format.load_level(tmp_path / f"{t}.safetensors")
        assert found.keys() == frozen[t - 1].keys()
        for name, array in found.items():
            assert array.dtype == frozen[t - 1][name].dtype
            assert array.tobytes() == frozen[t - 1][name].tobytes(), name
    dense = load_network(run.output.model, "dense", run.trainer)
    assert run.trainer.evaluate(dense) == result.metrics


@pytest.mark.parametrize(("scope", "dtype"), SETTINGS)
def test_accuracy_recomputed_from_the_file_is_the_recorded_one(train_tiny, scope, dtype):
    run, result, _ = train_tiny(scope, dtype)
    with elsa_format.open(run.output.model) as file:
        for t, level in enumerate(file.levels, 1):
            found = run.trainer.evaluate(load_network(run.output.model, t, run.trainer))
            assert found == dict(level.metrics) == result.levels[t - 1].metrics
        stored = {str(info.dtype.name) for n, info in file.tensors.items() if n in file.nested}
        assert stored == {"F32" if dtype == "float32" else "BF16"}


@pytest.mark.parametrize("scope", ["global", "uniform", "nm"])
def test_actual_sparsities_are_those_of_the_budgets(train_tiny, scope):
    run, result, _ = train_tiny(scope, "float32")
    params = result.network.params
    with elsa_format.open(run.output.model) as file:
        for level, stored in zip(run.levels, file.levels, strict=True):
            kept = sum(
                counts[run.levels.index(level)]
                for name, counts in file.nested.items()
                if run.scope.matches(name)
            )
            assert kept == sum(run.scope.budgets(params, level))
            assert stored.target == level.target
            assert stored.pattern == (level.name if scope == "nm" else None)


def test_nm_levels_keep_their_pattern_in_the_file(train_tiny):
    run, _, _ = train_tiny("nm", "float32")
    with elsa_format.open(run.output.model) as file:
        for t, level in enumerate(run.levels, 1):
            keep, length = level.pattern.n, level.pattern.m
            for name, array in file.load(t).items():
                if run.scope.matches(name):
                    assert np.count_nonzero(array.reshape(-1, length), axis=1).max() <= keep


def test_training_learns(train_tiny):
    _, result, _ = train_tiny("global", "float32")
    assert result.metrics["accuracy"] > 0.8
