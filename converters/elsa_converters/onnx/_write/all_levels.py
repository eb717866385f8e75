"""Export every level as one graph that reads the weights' counters with stock operators.

For each nested tensor two initializers name the same bytes of the ELSA file, once as floats and
once as integers. The integers' low bits are the counters, and a weight is zeroed unless its counter
is in first..last, which follow from the level. With a constant level the runtime folds all of this
away when it creates a session.
"""

import os
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from elsa_converters._errors import UnsupportedOnnx
from elsa_converters.onnx._graph.walk import FreshNames, compute_first
from elsa_converters.onnx._level.bind import Binding
from elsa_converters.onnx._level.read import Template, open_level
from elsa_converters.onnx._model.read import LEVELS_KEY
from elsa_converters.onnx._model.tensors import TO_ONNX, header_of, point_to
from elsa_converters.onnx._write.places import Places, places
from elsa_format.plugins import TensorInfo, dump, open_output, variant_name, weights_file

LEVEL = "elsa_level"
"""The input or initializer that chooses: 0 is the dense network, else a level 1..T."""
# Bytes 4..7 of an ELSA file are the upper half of its header length, which is at most 100,000,000:
# always zero. An int32 initializer that points there is 0, the dense network, and being external
# data it is what SessionOptions.add_external_initializers can replace before constants are folded.
# (add_initializer comes after that, and is ignored without a word.)
_ZERO_OFFSET = 4
_FIRST_OPSET_WITH_MOD = 10
_FIRST_OPSET_WITH_BITWISE = 18
_INTEGERS = {16: TensorProto.INT16, 32: TensorProto.INT32, 64: TensorProto.INT64}


def export_all_levels(
    source: str | os.PathLike[str],
    template: Template,
    target: str | os.PathLike[str],
    *,
    level_input: bool = False,
    max_bytes: int | None = None,
    force: bool = False,
) -> None:
    """Write a graph that runs any level of the ELSA file beside it, which stays as it is.

    The level is the scalar int32 initializer `elsa_level`, 0 for the dense network, which a session
    replaces (`all_levels_session`); with `level_input` it is a scalar int32 input of every run.
    A network of more than `max_bytes` is refused.

    >>> export_all_levels("net.safetensors", "net.onnx", "all-levels.onnx")
    """
    source = weights_file(source)
    with open_level(source, template, "dense", max_bytes=max_bytes) as opened:
        binding = opened.binding
        where = places(binding.network, target)
        builder = _Builder(binding, where)
        builder.add_level(as_input=level_input)
        for name in binding.network.tensors:
            if name in binding.names:
                builder.add_tensor(name)
        proto = builder.finish()
        if any(binding.model.weights[name].source for name in binding.names):
            for _ in opened.blocks():  # a template with values of its own: compare them
                pass
    with open_output(target, force=force, in_order=True) as output:
        output.write_at(0, proto.SerializeToString(deterministic=True))
        output.commit()


class _Builder:
    def __init__(self, binding: Binding, where: Places) -> None:
        self.binding, self.where = binding, where
        self.proto, self.graph = binding.proto, binding.proto.graph
        self.nodes: list[NodeProto] = []
        self.fresh = FreshNames(self.graph)
        self.fresh.taken |= binding.model.weights.keys()
        self.constants: dict[tuple[str, Any], str] = {}

    def add_level(self, *, as_input: bool) -> None:
        """The level, and from it the first and last counter that is kept."""
        if LEVEL in self.fresh.taken:
            raise UnsupportedOnnx(f"{self.binding.model.path}: the name {LEVEL!r} is in use")
        self.fresh.taken.add(LEVEL)
        if as_input:
            value = helper.make_tensor_value_info(LEVEL, TensorProto.INT32, [])
            self.graph.input.append(value)
        else:
            level = TensorProto(name=LEVEL, data_type=TensorProto.INT32)
            point_to(level, next(iter(self.where.locations.values())), _ZERO_OFFSET, 4)
            self.graph.initializer.append(level)
        profile = self.binding.network.profile
        levels = len(profile.levels)
        if profile.nested:
            # Looking the bounds up makes a level above T an error rather than level T.
            firsts = np.array([0] + [1] * levels, np.int32)
            lasts = np.array([1 << profile.bits, *range(1, levels + 1)], np.int32)
            self.first = self._node("Gather", [self._constant("firsts", firsts), LEVEL], "first")
            self.last = self._node("Gather", [self._constant("lasts", lasts), LEVEL], "last")
        names = [level.name for level in profile.levels]
        self.proto.metadata_props.add(
            key=LEVELS_KEY, value=dump({"levels": names, "version": "1.0"})
        )

    def add_tensor(self, name: str) -> None:
        """Let the graph have a tensor at the chosen level."""
        info = self.binding.info(name)
        if name in self.binding.network.profile.nested:
            self._nested(info)
        elif name in self.binding.network.profile.per_level:
            self._per_level(info)
        else:
            self._stored(name, info, info.shape)

    def finish(self) -> ModelProto:
        """The model: tensors first computed, then the template's graph."""
        for name, weight in self.binding.rest.items():
            tensor = header_of(weight.info)
            tensor.raw_data = weight.array().tobytes()
            assert tensor.name == name
            self.graph.initializer.append(tensor)
        compute_first(self.graph, self.nodes)
        return self.proto

    def _nested(self, info: TensorInfo) -> None:
        result = info.name
        weights = self._stored(self.fresh(f"{result}.weights"), info, info.shape)
        words = self.fresh(f"{result}.words")
        self._alias(words, _INTEGERS[info.dtype.size], info.shape, info)
        counter = self._counter(words, info)
        above = self._node("Greater", [counter, self.last], f"{result}.above")
        below = self._node("Less", [counter, self.first], f"{result}.below")
        dropped = self._node("Or", [above, below], f"{result}.dropped")
        if info.dtype.name == "BF16":
            # ONNX Runtime has no Where for bfloat16; through float32 every value comes back.
            wide = self._cast(weights, TensorProto.FLOAT, f"{result}.wide")
            kept = self._where(dropped, np.zeros((), np.float32), wide, f"{result}.kept")
            self._cast(kept, TensorProto.BFLOAT16, result, fresh=False)
        else:
            zero = np.zeros((), info.dtype.numpy)
            self._where(dropped, zero, weights, result, fresh=False)

    def _counter(self, words: str, info: TensorInfo) -> str:
        """The low bits of each word, as int32: comparisons of other widths are not everywhere."""
        result, modulus = info.name, 1 << self.binding.network.profile.bits
        dtype: type[np.signedinteger[Any]] = np.int32
        if info.dtype.size == 16:  # the sign is extended upwards, the low bits are the same
            words = self._cast(words, TensorProto.INT32, f"{result}.words32")
        elif info.dtype.size == 64:
            dtype = np.int64
        opset = self.binding.model.opset
        if opset >= _FIRST_OPSET_WITH_BITWISE:
            mask = self._constant("mask", np.array(modulus - 1, dtype))
            counter = self._node("BitwiseAnd", [words, mask], f"{result}.counter")
        elif opset >= _FIRST_OPSET_WITH_MOD:
            divisor = self._constant("modulus", np.array(modulus, dtype))
            counter = self._node("Mod", [words, divisor], f"{result}.counter")
        else:
            counter = self._remainder(words, np.array(modulus, dtype), result)
        if dtype is np.int64:
            counter = self._cast(counter, TensorProto.INT32, f"{result}.counter32")
        return counter

    def _remainder(self, words: str, modulus: "np.ndarray[Any, Any]", result: str) -> str:
        """Mod by older operators: division rounds towards zero, so negatives go round twice."""
        divisor = self._constant("modulus", modulus)

        def rest(dividend: str, label: str) -> str:
            quotient = self._node("Div", [dividend, divisor], f"{result}.{label}.quotient")
            product = self._node("Mul", [quotient, divisor], f"{result}.{label}.product")
            return self._node("Sub", [dividend, product], f"{result}.{label}")

        positive = self._node("Add", [rest(words, "rest"), divisor], f"{result}.positive")
        return rest(positive, "counter")

    def _per_level(self, info: TensorInfo) -> None:
        """All variants behind one another, and the level's taken from them."""
        name = info.name
        tensors, levels = (
            self.binding.network.header.tensors,
            len(self.binding.network.profile.levels),
        )
        stored = [name, *(variant_name(name, t) for t in range(1, levels + 1))]
        variants = [
            self._stored(self.fresh(f"{name}.{t}"), tensors[variant], (1, *info.shape))
            for t, variant in enumerate(stored)
        ]
        stacked = self._node("Concat", variants, f"{name}.levels", axis=0)
        self._node("Gather", [stacked, LEVEL], name, fresh=False, axis=0)

    def _stored(self, name: str, info: TensorInfo, shape: tuple[int, ...]) -> str:
        return self._alias(name, TO_ONNX[info.dtype.name], shape, info)

    def _alias(self, name: str, code: int, shape: tuple[int, ...], info: TensorInfo) -> str:
        tensor = TensorProto(name=name, data_type=code, dims=shape)
        self.where.point(tensor, info)
        self.graph.initializer.append(tensor)
        return name

    def _where(
        self,
        condition: str,
        yes: "np.ndarray[Any, Any]",
        no: str,
        name: str,
        *,
        fresh: bool = True,
    ) -> str:
        return self._node("Where", [condition, self._constant("zero", yes), no], name, fresh=fresh)

    def _cast(self, value: str, code: int, name: str, *, fresh: bool = True) -> str:
        return self._node("Cast", [value], name, fresh=fresh, to=code)

    def _node(
        self, op: str, inputs: list[str], name: str, *, fresh: bool = True, **attributes: Any
    ) -> str:
        output = self.fresh(name) if fresh else name
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def _constant(self, label: str, value: "np.ndarray[Any, Any]") -> str:
        key = (label, value.dtype)
        if key not in self.constants:
            name = self.constants[key] = self.fresh(f"elsa.{label}")
            self.graph.initializer.append(numpy_helper.from_array(value, name))
        return self.constants[key]
