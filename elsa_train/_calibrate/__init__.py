"""Levels nested into a trained JAX network by calibration: from samples of its inputs alone."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

from elsa_converters.calibrate import Nested

import elsa_format
from elsa_format import PackOptions, PackReport
from elsa_format.levels import Sparsity
from elsa_format.plugins import Progress, Target, no_progress
from elsa_train._calibrate.model import Classes, JaxModel
from elsa_train._calibrate.variables import Variables

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
    scope: Literal["auto", "uniform", "global"] | None = None,
    keep_dense: Literal["bounded", "exact"] = "bounded",
    favour: Literal["sparse", "dense"] | None = None,
    all_classes: bool = False,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    names: str | Iterable[str] | None = None,
    samples: int | None = None,
    max_memory: int | None = None,
    threads: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> PackReport:
    """Nest levels into a trained network, without training, and write the ELSA file.

    A tensor is nested if it is the weight of one matrix product or convolution, at most reshaped,
    transposed or cast before. Each level has a bias of its own where the layer has one, and a mean
    and a scale of its own where batch norm follows.

    >>> import jax, numpy as np
    >>> from flax import linen
    >>> net = linen.Dense(8)
    >>> batches = np.random.default_rng(0).normal(size=(4, 32, 16))
    >>> variables = net.init(jax.random.key(0), batches[0])
    >>> report = calibrate(net.apply, variables, batches, "linear.safetensors", sparsities=[75, 50])
    >>> report.nested, [level.nonzero for level in report.profile.levels]
    (('kernel',), [32, 64])

    Args:
        apply: Called as `apply(variables, batch)` for the network's outputs, as when it is used:
            without dropout, batch norm with its running averages. JAX has to be able to trace it.
        variables: Those of a linen module, an `nnx.Module`, or any tree of arrays. They stay as
            they are.
        batches: Samples of the inputs: trees of arrays, samples along the first axis. An eighth of
            the batches, at least one, is held back: levels are measured on them.
        out: A file, a stream, or a URL of a store.
        sparsities: Levels, sparsest first: percent, fractions below 1, or N:M patterns.
        classes: What a classifier's first output holds: "logits" or "probabilities".
        padding: Says of a batch where it is padded, which then does not count: booleans along the
            first axes of inputs and outputs, as (samples, tokens).
        scope: Shares of the layers: by what they cost the outputs ("auto"), alike, or by magnitude
            over all layers. Default: auto.
        keep_dense: What becomes of the dense network: "bounded", its outputs move little, or
            "exact", its weights stay but for the counters.
        favour: Whom a trade between levels and dense network serves.
        all_classes: Weigh all classes alike, however often the samples show them.
        include: Shell patterns of tensor names; only these are nested.
        exclude: Shell patterns of tensor names that are not nested.
        names: Names of the levels.
        samples: Use at most so many.
        max_memory: Bytes of activations that stay in memory; more go to temporary files.
        threads: Threads of the calibration, beside JAX's own; the result is the same with any
            number. Default: as many as there are cores.
        force: Replace files that exist.
        progress: Is told how much is done.

    Returns:
        What was packed; its `shared` says why a tensor carries no counters.
    """
    network = Variables(variables)
    options = PackOptions(
        sparsities=sparsities,
        calibrate=batches,
        scope=scope,
        keep_dense=keep_dense,
        favour=favour,
        all_classes=all_classes,
        include=include,
        exclude=exclude,
        names=names,
        samples=samples,
        max_memory=max_memory,
        threads=threads,
    )
    network.check_names([*options.include, *options.exclude])
    asked = options.calibration
    model = JaxModel(apply, network, batches, asked, classes=classes, padding=padding)
    nested = Nested(network, model, asked, left=model.left)
    return elsa_format.pack(nested, out, names=options.names, force=force, progress=progress)
