"""Metrics of every level in a module that runs, which is as it was afterwards."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from elsa_converters._errors import InvalidData
from elsa_converters._scores import (
    CLASSES,
    Scores,
    Values,
    check_labels,
    check_outputs,
    classify,
    compare,
)
from elsa_converters.torch._load import is_expanded, load_level, opened, unwrapped
from elsa_format import Incomplete, InvalidOption, Metric
from elsa_format.plugins import LevelLike, LevelNumber, Progress, no_progress, show_level

Function = Callable[[nn.Module, Any], Mapping[str, Any]]
"""Takes the model and a batch, and returns a value for each sample of it."""


def evaluate(
    model: nn.Module,
    net: Any,
    batches: Iterable[Any],
    metric: str | Function = "accuracy",
    *,
    verify: bool = True,
    progress: Progress = no_progress,
) -> dict[LevelNumber, dict[str, Metric]]:
    """Measure every available level and the dense network in a module, batch by batch.

    The module runs in evaluation mode, without gradients. Afterwards its tensors and modes are what
    they were; until then there is a copy of its tensors.

    Args:
        model: The module, on any device but meta.
        net: An ELSA file, a shard index, a model directory, a delivery file or an open `File`; or
            None for a model that transformers loaded with `ElsaConfig`.
        batches: What can be gone through once for each level, such as a list or a DataLoader: pairs
            of inputs and what is expected, or mappings of a model's arguments.
        metric: "accuracy", also top-5, of `labels`; "mse", also cosine similarity; "perplexity" of
            a language model, also its loss, of `input_ids`. Or a function that takes the model and
            a batch and returns a number for each sample by names of metrics; of a metric with a
            name of one's own with a direction, such as `(numbers, "lower")`.
        verify: Compare checksums.
        progress: Called with the numbers of batches that are done, and of all.

    Returns:
        The metrics of each level, sparsest first, and of "dense".

    Raises:
        InvalidData: There are no batches, or they do not fit the metric, or a level gives no
            numbers for them.

    >>> model = torch.nn.Linear(100, 100)
    >>> from elsa_format import pack
    >>> pack(model.state_dict(), "rated.safetensors", sparsities=[90, 50]).nested
    ('weight',)
    >>> found = evaluate(model, "rated.safetensors", [(torch.ones(4, 100), torch.arange(4))])
    >>> list(found), sorted(found[1])
    ([1, 2, 'dense'], ['accuracy', 'top5'])
    """
    _measure(metric)
    if not isinstance(batches, Iterable) or isinstance(batches, Iterator):
        raise InvalidOption(
            "batches: every level goes through them; expected a list or a DataLoader, not an "
            "iterator, which the first level would use up"
        )
    with _unchanged(model), switching(model, net, verify) as (levels, use):
        return run_levels(model, levels, use, batches, metric, progress)


def run_levels(
    model: nn.Module,
    levels: Sequence[LevelNumber],
    use: Callable[[LevelLike], object],
    batches: Iterable[Any],
    metric: str | Function,
    progress: Progress,
) -> dict[LevelNumber, dict[str, Metric]]:
    """Measure a model in evaluation mode, level by level."""
    measure, found = _measure(metric), dict[LevelNumber, dict[str, Metric]]()
    each = length_hint(batches) or 1
    for level in levels:
        use(level)
        scores = Scores(show_level(level))
        with torch.inference_mode():
            for number, batch in enumerate(batches):
                progress(len(found) * each + min(number, each), len(levels) * each)
                values = measure(model, _moved(batch, _device(model)), scores)
                scores.add(values, _count(values, scores.where))
        if not scores.samples:
            raise InvalidData("batches: holds no samples")
        found[level] = scores.metrics()
        if metric == "perplexity":
            found[level]["perplexity"] = _perplexity(found[level]["loss"])
    progress(len(levels) * each, len(levels) * each)
    return found


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put tensors and modes of a model back in the end."""
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise InvalidOption("the model is on the meta device; load a level into it first")
    if any(is_lazy(tensor) for tensor in tensors.values()):
        raise InvalidOption("the model has lazy parameters; run it once first")
    before = {number: tensor.detach().clone() for number, tensor in tensors.items()}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        with torch.no_grad():
            for number, tensor in tensors.items():
                if not is_expanded(tensor):  # which nothing can have written to
                    tensor.copy_(before[number])
        for module, mode in modes:
            module.training = mode


@contextmanager
def switching(
    model: nn.Module, net: Any, verify: bool = True
) -> Iterator[tuple[Sequence[LevelNumber], Callable[[LevelLike], object]]]:
    """The levels there are, and how the model gets to one of them."""
    if net is None:
        from elsa_converters.transformers import use_level  # imports transformers
        from elsa_converters.transformers._levels import levels_of

        held = levels_of(unwrapped(model))
        before = held.level
        try:
            yield held.network.files[0].available, lambda level: use_level(model, level)
        finally:
            held.level = before
        return
    with opened(net, verify=verify) as file:
        if not file.available:
            raise Incomplete(f"{file.path}: no level is downloaded yet; run: elsa-fetch")
        yield file.available, lambda level: load_level(model, file, level)


def _measure(metric: str | Function) -> Callable[[nn.Module, Any, Scores], Mapping[str, Any]]:
    if callable(metric):
        return lambda model, batch, scores: _own(metric(model, batch), scores.where)
    if metric not in _KNOWN:
        raise InvalidOption(
            f"metric={metric!r}: expected one of {', '.join(map(repr, _KNOWN))}, or a function "
            "of the model and a batch"
        )
    return _KNOWN[metric]


def _own(found: Any, where: str) -> Mapping[str, Any]:
    """What a function has returned, tensors as arrays."""
    if not isinstance(found, Mapping) or not found:
        raise InvalidData(f"{where}: the function returned no values by names of metrics")
    return {
        name: tuple(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
        for name, value in found.items()
    }


def _accuracy(model: nn.Module, batch: Any, scores: Scores) -> Mapping[str, Any]:
    labels, run = _split(batch, "labels")
    expected, outputs = _plain(labels), _plain(run(model))
    check_outputs(outputs, (*expected.shape, CLASSES), scores.where, scores.samples)
    check_labels(expected, "batches", outputs.shape[-1])
    return classify(outputs, expected)


def _mse(model: nn.Module, batch: Any, scores: Scores) -> Mapping[str, Any]:
    targets, run = _split(batch, "targets")
    expected, outputs = _plain(targets), _plain(run(model))
    check_outputs(outputs, expected.shape, scores.where, scores.samples)
    return compare(outputs, expected)


def _loss(model: nn.Module, batch: Any, scores: Scores) -> Mapping[str, Any]:
    """The loss of each sequence for each of its tokens, which are its weight in the mean."""
    given = dict(batch) if isinstance(batch, Mapping) else {}
    ids = given.get("input_ids") if given else batch
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise InvalidData(
            "batches: expected tensors of token numbers with two axes, or mappings with input_ids"
        )
    labels = given.pop("labels", ids)
    if (mask := given.get("attention_mask")) is not None:
        labels = labels.masked_fill(mask == 0, _IGNORED)
    logits = _first(model(**given) if given else model(ids))
    check_outputs(_plain(logits), (*ids.shape, CLASSES), scores.where, scores.samples)
    wanted = labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), wanted, ignore_index=_IGNORED, reduction="none"
    )
    tokens = (wanted != _IGNORED).sum(1)
    if not bool((tokens > 0).all()):
        raise InvalidData("batches: a sequence has no token to predict, expected two or more")
    return {"loss": Values(_plain(losses.sum(1) / tokens), "lower", _plain(tokens))}


_KNOWN = {"accuracy": _accuracy, "mse": _mse, "perplexity": _loss}
_IGNORED = -100
"""The label of tokens that are not to be predicted, as in transformers."""


def _perplexity(loss: Metric) -> Metric:
    value = math.exp(min(loss.value, 709.0))  # beyond, no float has it
    error = None if loss.error is None else value * loss.error
    return Metric(value, "lower", loss.samples, error)


def _split(batch: Any, key: str) -> tuple[Any, Callable[[nn.Module], Any]]:
    """What is expected, and how the model runs on the rest."""
    if isinstance(batch, Mapping) and key in batch:
        named = {name: value for name, value in batch.items() if name != key}
        return batch[key], lambda model: _first(model(**named))
    if isinstance(batch, tuple | list) and len(batch) > 1:
        *inputs, expected = batch
        return expected, lambda model: _first(model(*inputs))
    raise InvalidData(f"batches: expected pairs of inputs and {key}, or mappings with {key!r}")


def _first(outputs: Any) -> Any:
    """The logits, or else the first of several outputs."""
    logits = getattr(outputs, "logits", None)
    if logits is not None:
        return logits
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def _device(model: nn.Module) -> torch.device:
    tensors = (*model.parameters(), *model.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_moved(value, device) for value in batch)
    return batch


def _plain(value: Any) -> Any:
    """A tensor as an array; numpy has no bfloat16."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _count(values: Mapping[str, Any], where: str) -> int:
    """How many samples the values of a batch are for."""
    first = next(iter(values.values()))
    first = first[0] if isinstance(first, tuple) else first
    if np.ndim(first) != 1:
        raise InvalidData(f"{where}: metrics of a batch need a number for each of its samples")
    return len(first)
