"""Export one level as an ONNX model of its own, in one pass and constant memory."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from onnx import ModelProto

from elsa_converters._errors import UnsupportedOnnx
from elsa_converters._format import (
    LevelLike,
    Output,
    Profile,
    Progress,
    Source,
    Target,
    TensorInfo,
    dump,
    ignore,
    of_array,
    open_output,
)
from elsa_converters.onnx._fold import fold_batch_norm
from elsa_converters.onnx._hoist import remove_named
from elsa_converters.onnx._level import LevelPass, Template, open_level
from elsa_converters.onnx._sparse import coordinates, is_smaller_sparse
from elsa_converters.onnx._writer import LARGEST_FILE, Entry, ModelWriter

LEVEL_KEY = "elsa_level"
"""Entry of metadata_props that says which level of what a model is."""
_FRAME = 256  # generous bytes per tensor for what stands around its data


def export(
    source: Source,
    template: Template,
    target: Target,
    *,
    level: LevelLike,
    sparse: bool = False,
    fold: bool = False,
    external_data: bool | None = None,
    verify: bool = True,
    force: bool = False,
    progress: Progress = ignore,
) -> None:
    """Write one level of an ELSA file as an ONNX model.

    `sparse` writes sparse initializers where they are smaller, `fold` folds batch norm into the
    convolutions before it. Tensors go to a file beside the model, named after it with `.data`, if
    `external_data` is true or, unless it is false, the model would exceed 2 GB.

    >>> export("net.safetensors", "net.onnx", "level2.onnx", level=2)  # doctest: +SKIP
    """
    with open_level(source, template, level, verify=verify, progress=progress) as opened:
        proto = opened.binding.proto
        describe_level(proto, opened.binding.profile, opened.level)
        if fold:
            arrays = by_initializer(opened, opened.arrays())
            fold_batch_norm(proto, arrays)
            entries = [_array_entry(name, array, sparse) for name, array in arrays.items()]
        else:
            entries = _entries(opened, sparse)
        remove_named(proto.graph.input, {e.info.name for e in entries if e.kept is not None})
        with contextlib.ExitStack() as stack:
            data = None
            if _is_external(external_data, proto, entries):
                data = _data_output(stack, target, force)
            output = stack.enter_context(
                open_output(target, force=force, in_order=not sparse and data is None)
            )
            writer = ModelWriter(proto, entries, output, data)
            if fold:
                for name, array in arrays.items():
                    writer.append(name, array)
            else:
                initializers = opened.binding.initializers
                for name, block in opened.blocks():
                    writer.append(initializers.get(name, name), block)
            writer.finish()
            _commit(output, data, target)


def by_initializer(opened: LevelPass, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Arrays by the initializers they fill."""
    return {opened.binding.initializers.get(name, name): array for name, array in arrays.items()}


def describe_level(proto: ModelProto, profile: Profile, level: int | None) -> None:
    """Record in the model which level it is."""
    for index in reversed(range(len(proto.metadata_props))):
        if proto.metadata_props[index].key == LEVEL_KEY:
            del proto.metadata_props[index]
    if level is None:
        return
    entry = profile.levels[level - 1]
    document: dict[str, Any] = {"level": level, "name": entry.name, "version": "1.0"}
    if entry.digest and profile.shard is None:
        document["digest"] = entry.digest
    proto.metadata_props.add(key=LEVEL_KEY, value=dump(dict(sorted(document.items()))))


def _entries(opened: LevelPass, sparse: bool) -> list[Entry]:
    entries = []
    for name in opened.names():
        info, kept = opened.binding.info(name), opened.kept(name)
        smaller = sparse and kept is not None and is_smaller_sparse(info, kept)
        entries.append(Entry(info, kept if smaller else None))
    return entries + [Entry(weight.info) for weight in opened.binding.rest.values()]


def _array_entry(name: str, array: NDArray[Any], sparse: bool) -> Entry:
    info = TensorInfo(name, of_array(array.dtype), array.shape)
    kept = int(coordinates(array.reshape(-1).view(info.dtype.words)).size) if sparse else 0
    return Entry(info, kept if sparse and is_smaller_sparse(info, kept) else None)


def _is_external(asked: bool | None, proto: ModelProto, entries: Iterable[Entry]) -> bool:
    if asked is not None:
        return asked
    size: int = proto.ByteSize() + sum(
        _FRAME + len(entry.info.name) + entry.info.nbytes for entry in entries if entry.kept is None
    )
    return size > LARGEST_FILE


def _data_output(stack: contextlib.ExitStack, target: Target, force: bool) -> tuple[str, Output]:
    if not isinstance(target, str | os.PathLike):
        raise UnsupportedOnnx("external data needs a model file to stand beside, not a stream")
    path = Path(target).with_name(Path(target).name + ".data")
    return path.name, stack.enter_context(open_output(path, force=force))


def _commit(output: Output, data: tuple[str, Output] | None, target: Target) -> None:
    if data is None:
        output.commit()
        return
    data[1].commit()
    try:
        output.commit()
    except BaseException:
        assert isinstance(target, str | os.PathLike)
        Path(target).with_name(data[0]).unlink(missing_ok=True)  # alone it is of no use
        raise
