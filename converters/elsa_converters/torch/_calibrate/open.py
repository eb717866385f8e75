"""A PyTorch module and samples, ready to be nested by calibration, or nested at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import filter
from itertools import islice
from typing import Any

from torch import nn

import elsa_format
from elsa_converters._errors import InvalidData
from elsa_converters.calibrate import Layer, Nested
from elsa_converters.torch._calibrate.layers import Held
from elsa_converters.torch._calibrate.matrices import Joined
from elsa_converters.torch._calibrate.model import Classes, TorchModel, check_loaded
from elsa_converters.torch._calibrate.samples import at_most
from elsa_converters.torch._checkpoint import TorchCheckpoint
from elsa_converters.torch._load import unwrapped
from elsa_format import NoSuchTensor, PackOptions, PackReport
from elsa_format.levels import Pattern, Sparsity
from elsa_format.plugins import CalibrationOptions, Checkpoint, Progress, Target, no_progress


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    out: Target,
    *,
    sparsities: Sparsity | Iterable[Sparsity],
    classes: Classes | None = None,
    padding: Callable[[Any], Any] | None = None,
    force: bool = False,
    progress: Progress = no_progress,
    **fields: Any,
) -> PackReport:
    """Nest levels into a trained module, without training, and write the ELSA file.

    A weight is nested if a linear layer or a convolution of one, two or three dimensions uses it,
    and nothing else does. Each level has a bias of its own where the layer has one, and a mean and
    a scale of its own where batch norm follows. The module stays as it is.

    >>> from torch import nn, randn
    >>> model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    >>> batches = [randn(32, 16) for _ in range(8)]
    >>> report = calibrate(model, batches, "mlp.safetensors", sparsities=[75, 50])
    >>> report.nested, [level.nonzero for level in report.profile.levels]
    (('0.weight', '2.weight'), [192, 384])

    Args:
        model: The module, on any device and of any dtype. It runs in evaluation mode.
        batches: What it is called with: a tensor, a tuple of arguments or a mapping of them, each
            with samples along the first axis. Some batches are held back: levels are measured on
            them.
        out: A file, a stream, or a URL of a store.
        sparsities: Levels, sparsest first: percent, fractions below 1, or N:M patterns.
        classes: What a classifier's first output holds: "logits" or "probabilities". What is called
            `logits` holds logits.
        padding: Says of a batch where it is padded, which then does not count: booleans along the
            first axes of inputs and outputs. Default: its attention masks do.
        force: Replace files that exist.
        progress: Is told how much is done.
        **fields: Of `elsa_format.PackOptions`, those that calibration and level names need:
            `scope`, `keep_dense`, `favour`, `samples`, `all_classes`, `include`, `exclude`,
            `max_memory`, `threads`, `names`.

    Returns:
        What was packed; its `shared` says why a tensor carries no counters.

    Raises:
        InvalidData: The batches are too few, or the module gives no numbers for them.
    """
    options = PackOptions(sparsities=sparsities, calibrate=batches, **fields)
    found = calibration(model, batches, options.calibration, classes=classes, padding=padding)
    return elsa_format.pack(found, out, names=options.names, force=force, progress=progress)


def calibration(
    model: nn.Module,
    batches: Iterable[Any],
    options: CalibrationOptions,
    *,
    classes: Classes | None = None,
    padding: Callable[[Any], Any] | None = None,
) -> Nested:
    """A module that `elsa_format.pack` can nest by calibration; `calibrate` does both.

    >>> from fractions import Fraction
    >>> from torch import nn, randn
    >>> options = CalibrationOptions(levels=[Fraction(1, 2)])
    >>> calibration(nn.Linear(16, 8), [randn(32, 16)] * 4, options).nested
    ['weight']

    Args:
        model: The module.
        batches: What it is called with.
        options: What is asked.
        classes: What a classifier's first output holds.
        padding: Says of a batch where it is padded.
    """
    check_loaded(unwrapped(model))
    checkpoint = TorchCheckpoint(unwrapped(model).state_dict())
    for pattern in (*options.include, *options.exclude):
        if not filter(checkpoint.tensors, pattern):
            raise NoSuchTensor.of(checkpoint.path, "no tensor matches", pattern, checkpoint.tensors)
    return nested(
        checkpoint, model, batches, options, options.left_out(checkpoint.tensors),
        classes=classes, padding=padding,
    )  # fmt: skip


def nested(
    checkpoint: Checkpoint,
    model: nn.Module,
    batches: Iterable[Any],
    options: CalibrationOptions,
    left_out: Mapping[str, str],
    *,
    named: Mapping[str, Held] | None = None,
    classes: Classes | None = None,
    padding: Callable[[Any], Any] | None = None,
    notes: Sequence[str] = (),
) -> Nested:
    """The network of a checkpoint, which a module runs.

    Args:
        checkpoint: All tensors to be stored.
        model: The module.
        batches: What it is called with.
        options: What is asked.
        left_out: Tensors that are not to be nested, and why.
        named: Where the checkpoint's tensors are in the module; by default under their names.
        classes: What a classifier's first output holds.
        padding: Says of a batch where it is padded.
        notes: What else the user should know.
    """
    groups = [level.m for level in options.levels if isinstance(level, Pattern)]

    def wanted(name: str, layer: Layer) -> str | None:
        if (why := left_out.get(name, left_out.get(name.rpartition("[")[0]))) is not None:
            return why
        inputs = layer.columns // layer.kernel
        uneven = [m for m in groups if inputs % m] if layer.nested else []
        return f"{inputs} inputs, not a multiple of {uneven[0]}" if uneven else None

    network = TorchModel(
        model,
        at_most(batches, options.samples),
        named=named,
        wanted=wanted,
        classes=classes,
        padding=padding,
        max_memory=options.max_memory,
        threads=options.threads,
    )
    elsewhere = {} if named is None else {n: why for n, why in left_out.items() if n not in named}
    left = elsewhere | {n: left_out.get(n, why) for n, why in network.layers.left.items()}
    if not any(place.layer.nested for place in network.layers.places.values()):
        few = "; ".join(f"{name!r} {why}" for name, why in islice(left.items(), 3))
        raise InvalidData(f"{checkpoint.path}: no layer can be nested{few and ': '}{few}")
    return Joined(checkpoint, network, options, left=left, notes=notes)
