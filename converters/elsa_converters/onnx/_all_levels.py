"""Export every level as one graph: it reads the counters of the weights with stock operators.

For each nested tensor two initializers name the same bytes of the ELSA file, once as floats and
once as integers. The integers' low bits are the counters, and a weight is zeroed unless its counter
is in first..last, which follow from the level. With a constant level the runtime folds all of this
away when it creates a session.
"""

import os
from pathlib import Path

import numpy as np
from elsa_format._header import TensorInfo
from elsa_format._profile import variant_name
from elsa_format._stream import open_source, plain_names, read_profile
from elsa_format._output import open_output
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from elsa_converters.onnx._bind import Binding, FreshNames, bind, compute_first
from elsa_converters.onnx._export import LEVEL_KEY
from elsa_converters.onnx._level import Template
from elsa_converters.onnx._model import Model, read_model
from elsa_converters.onnx._template import relative_location
from elsa_converters.onnx._weights import TO_ONNX
from elsa_converters.onnx._writer import header_of, point_to

LEVEL = "elsa_level"
"""The input or initializer that chooses: 0 is the dense network, else a level 1..T."""
_ZERO_OFFSET = 4
# Bytes 4..7 of an ELSA file are the upper half of the header length, which is limited to
# 100,000,000: always zero. So an int32 there is 0, the dense network, and being external data it
# can be replaced when a session is created (SessionOptions.add_external_initializers); ONNX
# Runtime takes no other constant from outside before it folds constants.
_FIRST_OPSET_WITH_MOD = 10
_FIRST_OPSET_WITH_BITWISE = 18
_INTEGERS = {16: TensorProto.INT16, 32: TensorProto.INT32, 64: TensorProto.INT64}


def export_all_levels(
    source: str | os.PathLike[str],
    template: Template,
    target: str | os.PathLike[str],
    *,
    level_input: bool = False,
    verify: bool = True,
    force: bool = False,
) -> None:
    """Write a graph that runs any level of the ELSA file beside it, which stays as it is.

    The level is the scalar int32 initializer `elsa_level`, 0 for the dense network, which a session
    replaces; or with `level_input` a scalar int32 input of the graph, which every run gives.

    >>> export_all_levels("net.safetensors", "net.onnx", "levels.onnx")  # doctest: +SKIP
    """
    location = relative_location(target, source)
    with open_source(source) as opened:
        header, profile = read_profile(opened)
    if not isinstance(template, Model):
        template = read_model(template, also=set(plain_names(header)))
    binding = bind(template, header, profile)
    builder = _Builder(binding, location)
    builder.add_level(as_input=level_input)
    for name in binding.initializers:
        builder.add_tensor(name)
    builder.add_rest()
    proto = builder.finish()
    with open_output(target, force=force, in_order=True) as output:
        output.write_at(0, proto.SerializeToString(deterministic=True))
        output.commit()
