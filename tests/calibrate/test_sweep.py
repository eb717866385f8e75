"""A whole network is calibrated: what each level keeps, stores and is worth."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from calibrate.perceptron import Perceptron, Steps, perceptron
from elsa_converters.calibrate import Layer, Weights
from elsa_converters.calibrate._outputs import Answers, Compared, Reference
from internals import Settings, Sweep, largest, spread

import elsa_format as elsa
from elsa_format import read_counters
from elsa_format.levels import Pattern

LEVELS = [Fraction(8, 10), Fraction(1, 2)]
SIZES = [24, 40, 32, 16]


def samples(count: int = 320, inputs: int = 24, seed: int = 1) -> np.ndarray:
    """Inputs of a few causes, as those of real networks are."""
    rng = np.random.default_rng(seed)
    causes = rng.standard_normal((count, 8)) @ np.random.default_rng(0).standard_normal((8, inputs))
    return (causes + 0.3 * rng.standard_normal((count, inputs))).astype(np.float32)


def calibrated(model: Perceptron, levels: Sequence[Any] = LEVELS, **how: Any) -> tuple[Sweep, dict]:
    sweep = Sweep(model, levels, **how)
    return sweep, {solved.layer.name: solved.solution for solved in sweep.run()}


def by_magnitude(model: Perceptron, level: Fraction | Pattern) -> dict[str, Weights]:
    found = {}
    for (layer,) in model.stages:
        own = model.original(layer)
        size = math.prod(layer.shape)
        budget = level if isinstance(level, Pattern) else round((1 - level) * size)
        mask = largest(np.abs(own.weight), np.zeros(layer.shape, bool), budget)
        found[layer.name] = replace(
            own, weight=np.where(mask, own.weight, own.weight.dtype.type(0))
        )
    return found


def outputs(model: Perceptron, weights: dict[str, Weights], x: np.ndarray) -> np.ndarray:
    walk = Steps(model, [x])
    for _ in model.stages:
        walk.advance(weights)
    ((found,),) = walk.outputs()
    return found


def lost(model: Perceptron, weights: dict[str, Weights], x: np.ndarray) -> float:
    original = outputs(model, {}, x)
    return float(np.linalg.norm(outputs(model, weights, x) - original) / np.linalg.norm(original))


def check_stored(model: Perceptron, found: dict, levels: Sequence[Any]) -> None:
    """Every level is the dense network under its mask, bit for bit; masks are nested."""
    bits = len(levels).bit_length()
    for (layer,) in model.stages:
        solution = found[layer.name]
        words = solution.weight.view(f"u{layer.dtype.itemsize}")
        counters = read_counters(solution.weight, bits)
        assert solution.weight.dtype == layer.dtype
        assert (counters == solution.counters).all()
        *sparse, dense = solution.networks
        assert (dense.weight.view(words.dtype) == words).all()
        for level, network in enumerate(sparse, 1):
            mask = (counters > 0) & (counters <= level)
            assert (network.weight.view(words.dtype) == np.where(mask, words, 0)).all()
            assert (network.weight[mask] != 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("scope", ["auto", "uniform", "global"])
def test_levels_are_far_better_than_magnitude(dtype: Any, scope: Any) -> None:
    model = perceptron(SIZES, samples(), dtype=np.dtype(dtype))
    sweep, found = calibrated(model, scope=scope)
    check_stored(model, found, LEVELS)
    new = samples(200, seed=2)
    total = sum(math.prod(layer.shape) for (layer,) in model.stages)
    for at, level in enumerate(LEVELS):
        weights = {name: solution.networks[at] for name, solution in found.items()}
        kept = sum(int((w.weight != 0).sum()) for w in weights.values())
        assert kept == pytest.approx(float(1 - level) * total, abs=1.5)
        assert lost(model, weights, new) < 0.6 * lost(model, by_magnitude(model, level), new)
        assert sweep.measured[at].relative_error == pytest.approx(
            lost(model, weights, new), rel=0.4
        )
    dense = {name: solution.networks[-1] for name, solution in found.items()}
    assert lost(model, dense, new) < 0.12
    assert sweep.measured[-1].relative_error < sweep.measured[1].relative_error
    assert sweep.measured[1].relative_error < sweep.measured[0].relative_error
    assert sweep.measured[0].agreement is None


def test_measured_is_what_the_stored_networks_do_on_what_is_held_back() -> None:
    model = perceptron(SIZES, samples())
    sweep, found = calibrated(model)
    held = np.concatenate([model.parts[at] for at in sweep.held])
    for at, compared in enumerate(sweep.measured):
        weights = {name: solution.networks[at] for name, solution in found.items()}
        assert compared.relative_error == pytest.approx(lost(model, weights, held), rel=1e-4)


def test_patterns_hold_in_every_layer() -> None:
    levels = [Pattern(1, 4), Pattern(2, 4)]
    model = perceptron(SIZES, samples())
    sweep, found = calibrated(model, levels)
    check_stored(model, found, levels)
    new = samples(200, seed=2)
    for at, pattern in enumerate(levels):
        weights = {name: solution.networks[at] for name, solution in found.items()}
        for one in weights.values():
            assert ((one.weight.reshape(-1, 4) != 0).sum(1) == pattern.n).all()
        assert lost(model, weights, new) < 0.7 * lost(model, by_magnitude(model, pattern), new)
    assert sweep.budgets == []


def test_an_exact_dense_network_is_the_original_but_for_counters() -> None:
    model = perceptron(SIZES, samples())
    name = model.stages[0][0].name
    weight, _ = model.weights[name]
    weight[0, 0] = 0  # zeros that a level may have to keep
    _, found = calibrated(model, settings=Settings(exact=True), scope="uniform")
    check_stored(model, found, LEVELS)
    for (layer,) in model.stages:
        solution, own = found[layer.name], model.original(layer)
        words, original = solution.weight.view(np.uint32), own.weight.view(np.uint32)
        assert (np.abs((words & 0x7FFFFFFF).astype(int) - (original & 0x7FFFFFFF)) < 4).all()
        assert solution.networks[-1].bias.tobytes() == own.bias.tobytes()
        assert solution.networks[-1].scale is None
    new = samples(200, seed=2)
    for at, level in enumerate(LEVELS):
        weights = {name: solution.networks[at] for name, solution in found.items()}
        assert lost(model, weights, new) < lost(model, by_magnitude(model, level), new)


def test_the_dense_network_keeps_to_its_bound() -> None:
    errors = {}
    for bound in (0.05, 0.001):
        settings = Settings(bound=bound)
        sweep, found = calibrated(perceptron(SIZES, samples()), settings=settings)
        assert all(solution.errors[-1] <= max(bound, 2e-3) for solution in found.values())
        errors[bound] = [compared.relative_error for compared in sweep.measured]
    assert errors[0.001][-1] < errors[0.05][-1]
    assert errors[0.001][0] > errors[0.05][0]


class Grouped(Perceptron):
    """Each layer as two that see half of the inputs, and give half of the outputs."""

    def __init__(self, *arguments: Any, **layer: Any) -> None:
        super().__init__(*arguments, **layer)
        self.stages = [
            [replace(layer, groups=2, rows=layer.rows // 2, columns=layer.columns // 2)]
            for (layer,) in self.stages
        ]

    def original(self, layer: Layer) -> Weights:
        weight, bias = self.weights[layer.name]
        halves = weight.reshape(1, 2, layer.rows, 2, layer.columns)
        return Weights(np.ascontiguousarray(halves[0, [0, 1], :, [0, 1]]), bias.astype(np.float32))

    def walk(self, batches: Sequence[int]) -> "GroupedSteps":
        return GroupedSteps(self, [self.parts[at] for at in batches])


class GroupedSteps(Steps):
    def inputs(self, layer: Layer) -> Any:
        for x in self.live:
            yield x.reshape(len(x), 2, -1)

    def _layer(self, at: int, x: np.ndarray, weights: Any) -> np.ndarray:
        (layer,) = self.model.stages[at]
        mine = weights.get(layer.name) or self.model.original(layer)
        halves = x.reshape(len(x), 2, -1).transpose(1, 0, 2) @ mine.weight.transpose(0, 2, 1)
        y = halves.transpose(1, 0, 2).reshape(len(x), -1)
        y = (y if mine.scale is None else y * mine.scale) + mine.bias
        return y if at == len(self.model.stages) - 1 else np.maximum(y, 0)


@pytest.mark.parametrize("nested", [True, False])
def test_groups_and_layers_of_each_levels_own(nested: bool) -> None:
    plain = perceptron(SIZES, samples())
    model = Grouped(plain.weights, samples(), 16)
    if not nested:
        (last,) = model.stages[-1]
        model.stages[-1] = [replace(last, nested=False, dtype=last.dtype)]
    _, found = calibrated(model)
    new = samples(200, seed=2)
    for at in range(len(LEVELS)):
        weights = {name: solution.networks[at] for name, solution in found.items()}
        original = outputs_of(model, {}, new)
        error = np.linalg.norm(outputs_of(model, weights, new) - original)
        assert error < 0.7 * np.linalg.norm(original - original.mean(0))
    if not nested:
        solution = found[last.name]
        assert solution.counters is None
        assert (solution.networks[-1].weight == model.original(last).weight).all()
        assert (solution.networks[0].weight != 0).all()


def outputs_of(model: Grouped, weights: dict[str, Weights], x: np.ndarray) -> np.ndarray:
    walk = GroupedSteps(model, [x])
    for _ in model.stages:
        walk.advance(weights)
    ((found,),) = walk.outputs()
    return found


@pytest.mark.parametrize("classes", ["logits", None])
def test_the_same_samples_give_the_same_bytes_by_any_number_of_threads(classes: Any) -> None:
    sizes = [24, 160, 16]  # products of more rows than one piece
    runs = [
        calibrated(perceptron(sizes, samples(), classes=classes), threads=threads)[1]
        for threads in (1, 2, 1)
    ]
    for name, first in runs[0].items():
        for run in runs[1:]:
            assert first.weight.tobytes() == run[name].weight.tobytes()
            for one, other in zip(first.networks, run[name].networks, strict=True):
                assert one.bias.tobytes() == other.bias.tobytes()
                assert (one.scale is None) == (other.scale is None)
                assert one.scale is None or one.scale.tobytes() == other.scale.tobytes()


def test_classifiers_are_measured_by_agreement_and_count_unseen_classes() -> None:
    model = perceptron(SIZES, samples(), classes="logits")
    name = model.stages[-1][0].name
    model.weights[name][1][:4] -= 1000  # bias: these classes are never chosen
    sweep, _ = calibrated(model)
    assert sweep.answers is not None
    assert set(range(4)) <= set(sweep.answers.unseen)
    agreements = [compared.agreement for compared in sweep.measured]
    assert 0.3 < agreements[0] <= agreements[1] <= agreements[2] <= 1
    assert agreements[2] > 0.8
    alike, _ = calibrated(model, all_classes=True)
    assert alike.answers is not None
    assert alike.measured[0].relative_error != sweep.measured[0].relative_error


def test_all_classes_keeps_those_that_samples_never_showed() -> None:
    model = perceptron(SIZES, samples(), classes="logits")
    name = model.stages[-1][0].name
    model.weights[name][1][:8] -= 1000
    new, errors = samples(200, seed=2), {}
    for all_classes in (False, True):
        _, found = calibrated(model, all_classes=all_classes, scope="uniform")
        weights = {name: solution.networks[0] for name, solution in found.items()}
        difference = outputs(model, weights, new) - outputs(model, {}, new)
        errors[all_classes] = np.square(difference[:, :8]).mean()
    assert errors[True] < errors[False]


def test_inputs_that_never_vary_keep_their_weights_and_do_no_harm() -> None:
    x = samples()
    x[:, 3] = 0
    x[:, 5] = 2
    model = perceptron(SIZES, x)
    _, found = calibrated(model)
    new = samples(200, seed=2)
    new[:, 3], new[:, 5] = 0, 2
    dense = {name: solution.networks[-1] for name, solution in found.items()}
    assert lost(model, dense, new) < 0.12
    own, mine = model.original(model.stages[0][0]), found["w0"].networks[-1]
    np.testing.assert_allclose(mine.weight[..., [3, 5]], own.weight[..., [3, 5]], rtol=0.2)


class Silent(Perceptron):
    """A layer whose inputs are never shown, as an expert's that no token is sent to."""

    hidden = "w1"

    def walk(self, batches: Sequence[int]) -> Steps:
        class Walk(Steps):
            def inputs(self, layer: Layer) -> Any:
                for x in super().inputs(layer):
                    yield x[:0] if layer.name == Silent.hidden else x

        return Walk(self, [self.parts[at] for at in batches])


def test_layers_that_see_nothing_keep_their_largest_weights_and_are_told() -> None:
    plain = perceptron(SIZES, samples())
    model = Silent(plain.weights, samples(), 16)
    sweep, found = calibrated(model, scope="uniform")
    assert sweep.few == {"w1": 0}
    check_stored(model, found, LEVELS)
    own, solution = model.original(model.stages[1][0]), found["w1"]
    np.testing.assert_allclose(solution.networks[-1].weight, own.weight, rtol=1e-2, atol=1e-6)
    nothing = np.zeros(own.weight.shape, bool)
    want = largest(np.abs(own.weight), nothing, int((solution.counters == 1).sum()))
    assert ((solution.counters == 1) == want).mean() > 0.98


def test_few_samples_move_the_dense_network_little() -> None:
    sizes = [64, 64, 16]
    model = perceptron(sizes, samples(6, 64), batch=3)
    sweep, found = calibrated(model, scope="uniform")
    assert sweep.few == {"w0": 3, "w1": 3}
    new = samples(200, 64, seed=2)
    dense = {name: solution.networks[-1] for name, solution in found.items()}
    assert lost(model, dense, new) < 0.3


def test_walks_are_closed_in_any_case() -> None:
    before = Steps.closed, Steps.opened
    model = perceptron(SIZES, samples())
    calibrated(model)
    run = Sweep(model, LEVELS).run()
    next(run)
    run.close()
    bad = samples()
    bad[7, 2] = np.nan
    with pytest.raises(elsa.FormatError):
        calibrated(perceptron(SIZES, bad))
    assert Steps.opened > before[1]
    assert Steps.closed - before[0] == Steps.opened - before[1]


@pytest.mark.parametrize("at", [7, 130, 319])
def test_samples_without_an_answer_are_refused_before_any_work(at: int) -> None:
    bad, calls = samples(), []
    bad[at, 2] = np.nan
    sweep = Sweep(perceptron(SIZES, bad), LEVELS)
    with pytest.raises(elsa.FormatError, match="NaN or infinite") as caught:
        next(sweep.run(lambda done, total: calls.append(done)))
    assert "\n" not in str(caught.value)
    assert not calls


class Empty(Perceptron):
    """Every sample is of no length."""

    def walk(self, batches: Sequence[int]) -> Steps:
        return Steps(self, [self.parts[at][:0] for at in batches])


def test_samples_without_outputs_are_refused_before_any_work() -> None:
    model = Empty(perceptron(SIZES, samples()).weights, samples(), 16)
    with pytest.raises(elsa.FormatError, match="samples are empty"):
        next(Sweep(model, LEVELS).run())


def test_nothing_is_warned_of_that_is_refused(recwarn: pytest.WarningsRecorder) -> None:
    model = perceptron(SIZES, samples())
    model.weights["w0"][0][0, 0] = 1e30
    with pytest.raises(elsa.FormatError, match="NaN or infinite"):
        calibrated(model)
    assert not recwarn.list


@pytest.mark.parametrize(("count", "batch"), [(3, 1), (16, 16)])
def test_too_few_samples_are_refused(count: int, batch: int) -> None:
    with pytest.raises(elsa.FormatError, match=f"{count} samples in .*expected at least 4 in 2"):
        Sweep(perceptron(SIZES, samples(count), batch=batch), LEVELS)


def test_a_network_without_a_layer_to_nest_is_refused() -> None:
    with pytest.raises(elsa.FormatError, match="no layer can be nested"):
        Sweep(perceptron(SIZES, samples(), nested=False), LEVELS)


@pytest.mark.parametrize("scope", ["auto", "uniform"])
def test_progress_rises_to_the_whole(scope: Any) -> None:
    calls: list[tuple[int, int]] = []
    for _ in Sweep(perceptron(SIZES, samples()), LEVELS, scope=scope).run(
        lambda done, total: calls.append((done, total))
    ):
        pass
    done = [one for one, _ in calls]
    assert done == sorted(done)
    assert calls[-1][0] == calls[-1][1]


def test_auto_spares_a_layer_that_the_outputs_depend_on() -> None:
    x = samples()
    model = perceptron([24, 64, 64, 16], x)
    weight, _ = model.weights["w1"]
    weight *= 0.01  # what this layer makes hardly matters beside its bias
    sweep, _ = calibrated(model, [Fraction(9, 10)])
    kept = {name: count / model.weights[name][0].size for name, count in sweep.budgets[0].items()}
    assert kept["w1"] < kept["w0"]
    assert kept["w1"] < kept["w2"]
    assert sweep.spared == {name: share for name, share in kept.items() if share > 0.55}


def test_batches_are_held_back_at_equal_distances() -> None:
    assert spread(range(16), Fraction(1, 8)) == [7, 15]
    assert spread(range(2), Fraction(1, 8)) == [1]
    assert spread([0, 2, 3], Fraction(3, 8)) == [3]


def test_outputs_that_hold_nothing_do_not_count() -> None:
    one = np.ones((4, 2), np.float32)
    compared = Compared(None)
    compared.add([one, one[:, :0], one * 0], [one * 1.5, one[:, :0], one * 0])
    assert compared.relative_error == pytest.approx(0.5)


def test_outputs_of_several_sizes() -> None:
    """Pictures of several widths, whose columns are the features of the last axis."""
    parts = [np.random.default_rng(n).standard_normal((4, n)).astype(np.float32) for n in (3, 5)]
    reference = Reference(([part] for part in parts), None, 2)
    assert reference.distance([part] for part in parts) == 0
    assert reference.distance([part * 0] for part in parts) == pytest.approx(1, abs=0.2)
    answers = Answers("logits")
    assert [answers.add(part) for part in parts] == [True, False]


def test_a_level_that_serves_no_dense_network_is_the_better_for_it() -> None:
    settings = {"serving": Settings(), "alone": Settings(dense=0, bound=math.inf)}
    errors = {}
    for name, one in settings.items():
        sweep, _ = calibrated(perceptron(SIZES, samples()), LEVELS[:1], settings=one)
        errors[name] = [measured.relative_error for measured in sweep.measured]
    assert errors["alone"][0] < errors["serving"][0]
    assert errors["alone"][1] > errors["serving"][1]
