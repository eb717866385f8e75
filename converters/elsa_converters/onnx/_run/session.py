"""Run a level from memory: no file is written, and another level is one call away."""

import io
import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from onnx import load_model

from elsa_converters._errors import InvalidOnnx, MissingOperators
from elsa_converters.onnx._fast.pick import Precision, accelerate, check_precision
from elsa_converters.onnx._level.read import Template, open_level
from elsa_converters.onnx._model.read import LEVELS_KEY
from elsa_converters.onnx._model.write import with_values
from elsa_converters.onnx._write.all_levels import LEVEL
from elsa_converters.sparse import find_library
from elsa_converters.sparse._choice import Fast, check_fast
from elsa_format.plugins import LevelLike, LevelNumber, Source, find_level


def session(
    source: Source,
    template: Template,
    *,
    level: LevelLike,
    fast: Fast = False,
    precision: Precision = 32,
    sizes: Mapping[str, int] | None = None,
    max_bytes: int | None = None,
    **ort_options: Any,
) -> "LevelSession":
    """An onnxruntime session of one level of an ELSA file, which may be a pipe.

    `fast` as for `export`: if it is True, the layers are timed on this machine, for some seconds,
    with inputs whose named axes have these `sizes`; a sparsity takes the layers that have as much,
    untimed. Where the sparse operators were not built, a warning says so, and the session runs
    densely. `precision` lets them compute with integers of 16 or 8 bits, or, with "auto", with 16
    where that is faster here. A network of more than `max_bytes` is refused from the header alone.

    Options are attributes of onnxruntime.SessionOptions by name (`intra_op_num_threads=2`) and
    arguments of InferenceSession (`providers=`, `sess_options=`, …).

    >>> net = session("net.safetensors", "net.onnx", level=2)
    >>> (y,) = net.run(None, {"x": np.ones((5, 100), np.float32)})
    >>> y.shape
    (5, 100)
    """
    return LevelSession(source, template, level, ort_options, fast, sizes, max_bytes, precision)


class LevelSession(onnxruntime.InferenceSession):  # type: ignore[misc]
    """An InferenceSession of one level; `use_level` turns it into one of another.

    >>> net = session("net.safetensors", "net.onnx", level=2)
    >>> net.use_level(1)
    >>> net.level
    1
    """

    level: LevelNumber

    def __init__(
        self,
        source: Source,
        template: Template,
        level: LevelLike,
        options: dict[str, Any],
        fast: Fast = False,
        sizes: Mapping[str, int] | None = None,
        max_bytes: int | None = None,
        precision: Precision = 32,
    ) -> None:
        self._elsa_fast, self._elsa_sizes = check_fast(fast), sizes
        self._elsa_precision = check_precision(precision, fast)
        self._elsa_source, self._elsa_template = source, template
        self._elsa_options = options
        self._elsa_max_bytes = max_bytes
        self._create(level)

    def use_level(self, level: LevelLike) -> None:
        """Load another level of the same file; a stream is used up and cannot give another one."""
        if not isinstance(self._elsa_source, str | os.PathLike):
            raise io.UnsupportedOperation("a stream has one level to give; open a session anew")
        if "sess_options" in self._elsa_options:
            raise ValueError("a SessionOptions object serves once: give its settings by name")
        self._create(level)

    def _create(self, level: LevelLike) -> None:
        options, arguments = _split(self._elsa_options)
        source, template, most = self._elsa_source, self._elsa_template, self._elsa_max_bytes
        with open_level(source, template, level, max_bytes=most) as opened:
            arrays = opened.arrays()
            binding = opened.binding
        self._elsa_template = binding.model  # parsed once
        proto = binding.proto
        if self._elsa_fast is not False and _add_operators(options):
            proto, arrays, _ = accelerate(
                proto,
                arrays,
                str(binding.model.path),
                self._elsa_fast,
                precision=self._elsa_precision,
                threads=options.intra_op_num_threads or None,
                sizes=self._elsa_sizes,
            )
        graph, values = with_values(proto, arrays)
        options.add_external_initializers(list(values), list(values.values()))
        super().__init__(graph, options, **arguments)
        # Until here the values had to live; the session has copies of its own.
        del values, arrays
        self.level = opened.level


def _split(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    arguments = dict(given)
    options = arguments.pop("sess_options", None)
    if options is None:
        options = onnxruntime.SessionOptions()
    for name in list(arguments):
        if hasattr(onnxruntime.SessionOptions, name):
            setattr(options, name, arguments.pop(name))
    return options, arguments


def _add_operators(options: Any) -> bool:
    """Let a session know the sparse operators; False if there are none."""
    library = find_library()
    if library is None:
        warnings.warn(
            "the sparse operators were not built (no C compiler), so the session runs densely",
            RuntimeWarning,
            stacklevel=5,
        )
        return False
    options.register_custom_ops_library(str(library))
    return True


def all_levels_session(
    model: str | os.PathLike[str], *, level: LevelLike, **ort_options: Any
) -> onnxruntime.InferenceSession:
    """A session of one level of a graph that `export_all_levels` wrote without `level_input`.

    >>> from elsa_converters.onnx import export_all_levels
    >>> export_all_levels("net.safetensors", "net.onnx", "levels.onnx")
    >>> net = all_levels_session("levels.onnx", level=2)
    >>> net.run(None, {"x": np.ones((5, 100), np.float32)})[0].shape
    (5, 100)
    """
    options, arguments = _split(ort_options)
    found = find_level(level, _level_names(model), os.fspath(model))
    number = np.array(0 if found == "dense" else found, np.int32)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(number)  # held until the session exists
    options.add_external_initializers([LEVEL], [value])
    return onnxruntime.InferenceSession(os.fspath(model), options, **arguments)


def _level_names(model: str | os.PathLike[str]) -> list[str]:
    """The names of the levels, as the graph of all of them says."""
    for entry in load_model(os.fspath(model), load_external_data=False).metadata_props:
        if entry.key == LEVELS_KEY:
            return [str(name) for name in json.loads(entry.value)["levels"]]
    raise InvalidOnnx(f"{os.fspath(model)}: is not a graph of all levels")


def sparse_ops_library() -> str:
    """Path of the library for `SessionOptions.register_custom_ops_library`, in any language.

    >>> import onnxruntime
    >>> options = onnxruntime.SessionOptions()
    >>> options.register_custom_ops_library(sparse_ops_library())
    """
    path = find_library()
    if path is None:
        raise MissingOperators("models for them still run, densely")
    return str(path)
