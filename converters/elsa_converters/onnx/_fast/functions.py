"""What the operators mean, in stock operators: functions that every model with them carries along.

So such a model runs wherever ONNX does, with dense weights. ONNX Runtime prefers the library's
kernels where it is registered.
"""

from onnx import FunctionProto
from onnx.parser import parse_function

DOMAIN = "elsa"
VERSION = 1
"""Of the domain; a change of what an operator means would raise it."""
FIRST_OPSET = 12
"""Of the stock operators in here: constants that are lists of integers."""
FIRST_IR = 8
"""The first version of ONNX with functions."""

# From CSR: a row's first value is marked with 1, so the sum of all marks up to a value is its row.
_ROWS = """
    starts = Cast <to = 7> (indptr)
    later_starts = Slice (starts, one, minus_one)
    count = Shape (indices)
    no_marks = ConstantOfShape <value = int64[1] {0}> (count)
    later_count = Shape (later_starts)
    ones = ConstantOfShape <value = int64[1] {1}> (later_count)
    marks = ScatterElements <axis = 0> (no_marks, later_starts, ones)
    row = CumSum (marks, axis)
    row_start = Mul (row, columns)
    column = Cast <to = 7> (indices)
    place = Add (row_start, column)
"""
# From N:M: n values for each m columns, and a code that says in which of the m a value is.
_PATTERN = """
    n_and_m = Constant <value_ints: ints = @pattern> ()
    n = Slice (n_and_m, zero, one)
    m = Slice (n_and_m, one, two)
    scale = Constant <value_ints: ints = @scales> ()
    wide_codes = Cast <to = 7> (codes)
    code_rows = Reshape (wide_codes, code_shape)
    shifted = Div (code_rows, scale)
    digits = Mod (shifted, m)
    code = Reshape (digits, minus_one)
    count = Size (code)
    number = Range (axis, count, step)
    group = Div (number, n)
    group_start = Mul (group, m)
    place = Add (group_start, code)
"""
_WEIGHT = """
    zero = Constant <value = int64[1] {{0}}> ()
    one = Constant <value = int64[1] {{1}}> ()
    two = Constant <value = int64[1] {{2}}> ()
    minus_one = Constant <value = int64[1] {{-1}}> ()
    code_shape = Constant <value = int64[2] {{-1, 1}}> ()
    axis = Constant <value = int64 {{0}}> ()
    step = Constant <value = int64 {{1}}> ()
    weight_shape = Constant <value_ints: ints = @shape> ()
    empty = ConstantOfShape <value = float[1] {{0}}> (weight_shape)
    outputs = Slice (weight_shape, zero, one)
    size = Size (empty)
    columns = Div (size, outputs)
    {places}
    flat = Reshape (empty, minus_one)
    floats = Cast <to = 1> (values)
    filled = ScatterElements <axis = 0> (flat, place, floats)
    weight = Reshape (filled, weight_shape)
"""
_MATMUL = """
    turned = Transpose <perm = [1, 0]> (weight)
    product = MatMul (x, turned)
    biased = Add (product, bias)
"""
_CONV = """
    biased = Conv <strides: ints = @strides, pads: ints = @pads> (x, weight, bias)
"""
_OPERATORS = {
    "SparseMatMul": ("shape", "indices, indptr", _ROWS, _MATMUL),
    "SparseConv": ("shape, strides, pads", "indices, indptr", _ROWS, _CONV),
    "NMMatMul": ("shape, pattern, scales", "codes", _PATTERN, _MATMUL),
}


def operator(kind: str, *, add: bool, relu: bool) -> str:
    """The name of an operator.

    >>> operator("SparseConv", add=True, relu=True)
    'SparseConvAddRelu'
    """
    return kind + "Add" * add + "Relu" * relu


def function(name: str, opset: int, *, integers: bool = False) -> FunctionProto:
    """The definition of an operator, for a model with this version of the stock operators.

    Where the library computes with integers, the stock operators still compute with floats.
    """
    kind = name.removesuffix("Relu").removesuffix("Add")
    attributes, places, decode, compute = _OPERATORS[kind]
    attributes += ", bits" if integers else ""
    inputs, ending = f"x, values, {places}, bias", "y = Identity (biased)"
    if name.endswith("AddRelu"):
        ending = "added = Add (biased, sum)\n y = Relu (added)"
    elif name.endswith("Add"):
        ending = "y = Add (biased, sum)"
    elif name.endswith("Relu"):
        ending = "y = Relu (biased)"
    if name != kind and name != f"{kind}Relu":
        inputs += ", sum"
    body = _WEIGHT.format(places=decode) + compute + ending
    return parse_function(
        f'<domain: "{DOMAIN}", opset_import: ["" : {opset}]>\n'
        f"{name} <{attributes}> ({inputs}) => (y) {{ {body} }}"
    )
