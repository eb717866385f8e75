"""ONNX both ways: import any model, export any level or all of them, run a level from memory.

>>> from elsa_converters import onnx
>>> onnx.export("net.safetensors", "net.onnx", "level2.onnx", level=2)
2
>>> net = onnx.session("net.safetensors", "net.onnx", level=2)
"""

from elsa_converters._errors import (
    InvalidData,
    InvalidExternalData,
    InvalidOnnx,
    MissingOperators,
    TemplateMismatch,
    UnsupportedOnnx,
)
from elsa_converters.onnx._calibrate.open import calibration
from elsa_converters.onnx._fast.timing import measured_axes
from elsa_converters.onnx._run.bench import Integers, Measured, measure_levels
from elsa_converters.onnx._run.evaluate import evaluate
from elsa_converters.onnx._run.latency import level_within
from elsa_converters.onnx._run.session import (
    LevelSession,
    all_levels_session,
    session,
    sparse_ops_library,
)
from elsa_converters.onnx._write.all_levels import export_all_levels
from elsa_converters.onnx._write.export import ExportOptions, export
from elsa_converters.onnx._write.template import OnnxCheckpoint, renew_template, write_template
from elsa_converters.onnx._write.web import export_web

__all__ = [
    "ExportOptions",
    "Integers",
    "InvalidData",
    "InvalidExternalData",
    "InvalidOnnx",
    "LevelSession",
    "Measured",
    "MissingOperators",
    "OnnxCheckpoint",
    "TemplateMismatch",
    "UnsupportedOnnx",
    "all_levels_session",
    "calibration",
    "evaluate",
    "export",
    "export_all_levels",
    "export_web",
    "level_within",
    "measure_levels",
    "measured_axes",
    "renew_template",
    "session",
    "sparse_ops_library",
    "write_template",
]
