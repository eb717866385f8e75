"""Levels nested into a trained JAX network by calibration: from samples of its inputs alone."""

from collections.abc import Callable, Iterable
from typing import Any

from elsa_converters.calibrate import Nested

import elsa_format
from elsa_format import PackOptions, PackReport
from elsa_format.levels import Sparsity
from elsa_format.plugins import Progress, Target, no_progress
from elsa_train._calibrate_model import Classes, JaxModel
from elsa_train._calibrate_variables import Variables

PyTree = Any


def calibrate(
    apply: Callable[[PyTree, PyTree], PyTree],
    variables: PyTree,
    batches: Iterable[PyTree],
    out: Target,
    *,
    sparsities: Sparsity | Iterable[Sparsity],
    classes: Classes | None = None,
    padding: Callable[[PyTree], Any] | None = None,
    force: bool = False,
    progress: Progress = no_progress,
    **fields: Any,
) -> PackReport:
    """Nest levels into a trained network, without training, and write the ELSA file.

    A tensor is nested if it is the weight of one matrix product or convolution, at most reshaped,
    transposed or cast before. Each level has a bias of its own where the layer has one, and a mean
    and a scale of its own where batch norm follows.

    >>> import jax, numpy as np
    >>> from flax import linen
    >>> model = linen.Dense(8)
    >>> batches = np.random.default_rng(0).normal(size=(4, 32, 16))
    >>> variables = model.init(jax.random.key(0), batches[0])
    >>> report = calibrate(model.apply, variables, batches, "net.safetensors", sparsities=[75, 50])
    >>> report.nested, [level.nonzero for level in report.profile.levels]
    (('kernel',), [32, 64])

    Args:
        apply: Called as `apply(variables, batch)` for the network's outputs, as when it is used:
            without dropout, batch norm with its running averages. JAX has to be able to trace it.
        variables: Those of a linen module, an `nnx.Module`, or any tree of arrays. They stay as
            they are.
        batches: Samples of the inputs: trees of arrays, samples along the first axis. The last
            batches, at least one, are held back: levels are measured on them.
        out: A file, a stream, or a URL of a store.
        sparsities: Levels, sparsest first: percent, fractions below 1, or N:M patterns.
        classes: What a classifier's first output holds: "logits" or "probabilities".
        padding: Says of a batch where it is padded, which then does not count: booleans along the
            first axes of inputs and outputs, as (samples, tokens).
        force: Replace files that exist.
        progress: Is told how much is done.
        **fields: Of `elsa_format.PackOptions`, those that calibration and level names need:
            `scope`, `keep_dense`, `favour`, `samples`, `all_classes`, `include`, `exclude`,
            `max_memory`, `threads`, `names`.

    Returns:
        What was packed; its `shared` says why a tensor carries no counters.
    """
    network = Variables(variables)
    options = PackOptions(sparsities=sparsities, calibrate=batches, **fields)
    network.check_names([*options.include, *options.exclude])
    asked = options.calibration
    model = JaxModel(apply, network, batches, asked, classes=classes, padding=padding)
    nested = Nested(network, model, asked, left=model.left)
    return elsa_format.pack(nested, out, names=options.names, force=force, progress=progress)
