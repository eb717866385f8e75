"""elsa-format/run: levels by kernels that skip zeros, against ONNX Runtime in Python."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from conftest import ROOT, missing
from elsa_converters.onnx import export_web, session
from onnx import TensorProto, helper, numpy_helper
from report.browser import find_programs
from test_browser import Visitor
from test_runtimes import found as find_runtime
from test_web_docs import Ranges
from web_networks import LEVELS, assert_same, served

import elsa_format

HERE = Path(__file__).parent
WASM = ROOT / "js" / "src" / "run" / "wasm.js"
NEAR = 1e-4
"""How far an output in float32 may be from Python's."""
PAGE = """<!doctype html><link rel="icon" href="data:,">
<script type="module">
import { open } from './src/run.js'
import { runTasks } from './run_tasks.js'
runTasks(open, 'www/').then(found => window.found = found, e => window.found = { error: e.stack })
</script>"""


def test_levels_in_node(
    run_node: Callable[..., str], networks: Path, expected: dict[str, Any]
) -> None:
    found = json.loads(run_node(HERE / "run_kernels.mjs", f"{networks}/www/"))
    assert_same(found, expected, NEAR)


@pytest.mark.parametrize("command", [["deno", "run", "-A"], ["bun"]], ids=["deno", "bun"])
def test_levels_elsewhere(command: list[str], networks: Path, expected: dict[str, Any]) -> None:
    script = [str(HERE / "run_kernels.mjs"), f"{networks}/www/"]
    command = [find_runtime(command[0]), *command[1:], *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_same(json.loads(done.stdout), expected, NEAR)


def test_levels_in_chromium(networks: Path, expected: dict[str, Any], tmp_path: Path) -> None:
    if find_programs() is None:
        missing("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    (tmp_path / "index.html").write_text(PAGE)
    (tmp_path / "src").symlink_to(ROOT / "js" / "src")
    (tmp_path / "www").symlink_to(networks / "www")
    shutil.copy(HERE / "run_tasks.js", tmp_path)
    for url in served(tmp_path, Ranges):
        with Visitor() as browser:
            browser.visit(url)
            found = browser.wait("return window.found")
            assert "error" not in found, found
            assert_same(found, expected, NEAR)


def test_kernels_are_those_of_the_sources(tmp_path: Path) -> None:
    """Which clang 19 makes into the same bytes every time."""
    if not (shutil.which("clang-19") and shutil.which("wasm-ld-19")):
        pytest.skip("needs clang 19 and its linker (Debian: clang-19, lld-19)")
    build = ROOT / "js" / "wasm" / "run" / "build.sh"
    subprocess.run([build, tmp_path / "wasm.js"], check=True, capture_output=True)
    same = (tmp_path / "wasm.js").read_text() == WASM.read_text()
    assert same, "the C has changed since; run: js/wasm/run/build.sh"


def web(folder: Path, nodes: list[Any], inputs: Any, constants: Any) -> Path:
    """A graph of these nodes, packed, and its directory for the web; its output is y."""
    made = [helper.make_tensor_value_info(name, *rest) for name, *rest in inputs]
    values = [numpy_helper.from_array(np.asarray(a), name) for name, a in constants.items()]
    output = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "net", made, output, values)
    opset = helper.make_opsetid("", 17)
    onnx.save(helper.make_model(graph, opset_imports=[opset], ir_version=8), folder / "m.onnx")
    weights, template = folder / "net.safetensors", folder / "net.onnx"
    elsa_format.pack(folder / "m.onnx", weights, sparsities=[80, 50], template=template)
    export_web(weights, template, folder / "web")
    return folder / "web"


RUN = """
import { open } from 'SOURCE'
const [base, levels, feeds, fallback] = JSON.parse(process.argv[2])
const fed = Object.values(feeds)
for (const feed of fed) if (feed.type !== 'int64') feed.data = Float32Array.from(feed.data)
const given = []
const ort = {
  Tensor: class { constructor(type, data, dims) { Object.assign(this, { type, data, dims }) } },
  InferenceSession: class Other {
    static async create(graph, { externalData }) {
      for (const { path, data } of externalData) given.push([path, data.length])
      return new Other()
    }
    async run(feeds) {
      const data = Object.values(feeds).map(feed => feed instanceof ort.Tensor)
      return { y: { data, dims: [1] } }
    }
  },
}
const found = []
for (const level of levels) {
  const net = await open(base, { level, fallback: fallback && ort })
  found.push(Array.from((await net.run(feeds)).y.data))
}
console.log(JSON.stringify([found, given]))
"""


def run_web(run_node: Callable[..., str], folder: Path, feeds: dict[str, Any], **more: Any) -> Any:
    """What elsa-format/run makes of a directory, at each level."""
    script = folder.parent / "run.mjs"
    script.write_text(RUN.replace("SOURCE", (ROOT / "js" / "src" / "run.js").as_uri()))
    written = {
        name: {"dims": x.shape, "data": x.ravel().tolist()}
        | ({} if x.dtype == np.float32 else {"type": "int64"})
        for name, x in feeds.items()
    }
    question = [str(folder), LEVELS, written, bool(more.get("fallback"))]
    return json.loads(run_node(script, json.dumps(question)))


RNG = np.random.default_rng(7)


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def node(op: str, *inputs: str, out: str = "y", **attributes: Any) -> Any:
    return helper.make_node(op, inputs, [out], **attributes)


def gated(x: str, *, divides: bool) -> list[Any]:
    """x · clip(x + 3, 0, 6) / 6, as exporters write it."""
    last = ("Div", "six") if divides else ("Mul", "sixth")
    return [
        node("Add", x, "three", out="g1"),
        node("Clip", "g1", "nought", "six", out="g2"),
        node("Mul", x, "g2", out="g3"),
        node(last[0], "g3", last[1]),
    ]


NUMBERS = {"three": 3, "nought": 0, "six": 6, "sixth": 1 / 6, "two": 2, "tiny": 1e-6, "half": 0.5}
X4 = ("x", TensorProto.FLOAT, ["b", 6, "h", "w"])
X2 = ("x", TensorProto.FLOAT, ["b", 24])
PARTS = {
    "conv, odd strides": (
        [node("Conv", "x", "w", "c", strides=[2, 1], pads=[1, 0, 2, 1])],
        X4,
        {"w": floats(8, 6, 3, 2), "c": floats(8)},
        (2, 6, 9, 7),
    ),
    "conv, dilated": (
        [node("Conv", "x", "w", dilations=[2, 3], pads=[2, 3, 2, 3])],
        X4,
        {"w": floats(8, 6, 3, 3)},
        (2, 6, 9, 8),
    ),
    "conv, groups": (
        [
            node("Conv", "x", "w", "c", group=2, pads=[1] * 4),
        ],
        X4,
        {"w": floats(4, 3, 3, 3), "c": floats(4)},
        (2, 6, 5, 6),
    ),
    "conv, one dimension": (
        [node("Conv", "x", "w", strides=[2], pads=[1, 1])],
        ("x", TensorProto.FLOAT, ["b", 6, "w"]),
        {"w": floats(8, 6, 3)},
        (2, 6, 11),
    ),
    "conv, depthwise": (
        [
            node("Conv", "x", "w", "c", group=6, strides=[2, 2], pads=[2] * 4, out="a"),
            node("Relu", "a"),
        ],
        X4,
        {"w": floats(6, 1, 5, 5), "c": floats(6)},
        (2, 6, 9, 21),
    ),
    "conv, sum and relu": (
        [node("Conv", "x", "w", out="a"), node("Add", "x", "a", out="s"), node("Relu", "s")],
        X4,
        {"w": floats(6, 6, 1, 1)},
        (2, 6, 5, 4),
    ),
    "conv, affine channels": (
        [node("Conv", "x", "w", out="a"), node("Mul", "a", "m", out="s"), node("Add", "k", "s")],
        X4,
        {"w": floats(8, 6, 3, 3), "m": floats(1, 8, 1, 1), "k": floats(8, 1, 1)},
        (1, 6, 5, 4),
    ),
    "conv, a sum of another shape": (
        [
            node("Conv", "x", "w", out="a"),
            node("GlobalAveragePool", "a", out="p"),
            node("Add", "a", "p", out="s"),
            node("Relu", "s"),
        ],
        X4,
        {"w": floats(8, 6, 3, 3)},
        (2, 6, 5, 4),
    ),
    "pools": (
        [
            node("MaxPool", "x", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, out="a"),
            node("AveragePool", "a", kernel_shape=[2, 2], pads=[1, 0, 0, 1], out="p"),
            node("Conv", "p", "w"),
        ],
        X4,
        {"w": floats(8, 6, 1, 1)},
        (2, 6, 9, 7),
    ),
    "gemm": (
        [
            node("Gemm", "x", "w", "c", transB=1, alpha=0.5, beta=2.0, out="a"),
            node("HardSigmoid", "a"),
        ],
        X2,
        {"w": floats(10, 24), "c": floats(10)},
        (3, 24),
    ),
    "product, sum of another shape": (
        [
            node("MatMul", "x", "w", out="a"),
            node("ReduceMean", "a", axes=[0], out="m"),
            node("Add", "a", "m", out="s"),
            node("Relu", "s"),
        ],
        X2,
        {"w": floats(24, 10)},
        (5, 24),
    ),
    "hardswish": (
        [node("MatMul", "x", "w", out="a"), *gated("a", divides=True)],
        X2,
        {"w": floats(24, 10)},
        (3, 24),
    ),
    "hardswish, by a sixth": (
        [node("MatMul", "x", "w", out="a"), *gated("a", divides=False)],
        X2,
        {"w": floats(24, 10)},
        (3, 24),
    ),
    "silu": (
        [node("MatMul", "x", "w", out="a"), node("Sigmoid", "a", out="s"), node("Mul", "s", "a")],
        X2,
        {"w": floats(24, 10)},
        (3, 24),
    ),
    "normalization, taken apart": (
        [
            node("MatMul", "x", "w", out="a"),
            node("ReduceMean", "a", axes=[-1], out="m"),
            node("Sub", "a", "m", out="d"),
            node("Pow", "d", "two", out="q"),
            node("ReduceMean", "q", axes=[-1], out="v"),
            node("Add", "v", "tiny", out="e"),
            node("Sqrt", "e", out="r"),
            node("Div", "d", "r", out="n"),
            node("Mul", "n", "k", out="t"),
            node("Add", "t", "c"),
        ],
        X2,
        {"w": floats(24, 10), "k": floats(10), "c": floats(10)},
        (3, 24),
    ),
    "shapes": (
        [
            node("MatMul", "x", "w", out="a"),
            node("Shape", "a", out="s"),
            node("Slice", "s", "i0", "i1", out="b"),
            node("Concat", "b", "i52", out="t", axis=0),
            node("Reshape", "a", "t", out="r"),
            node("Transpose", "r", perm=[2, 0, 1], out="p"),
            node("Slice", "p", "i1", "i0", "i2", "m1", out="z"),
            node("Concat", "p", "z", axis=-1, out="f"),
            node("Softmax", "f", axis=-1),
        ],
        X2,
        {
            "w": floats(24, 10),
            "i0": np.array([0]),
            "i1": np.array([1]),
            "i2": np.array([2]),
            "m1": np.array([-1]),
            "i52": np.array([5, 2]),
        },
        (3, 24),
    ),
    "products of values": (
        [
            node("MatMul", "x", "w", out="a"),
            node("Unsqueeze", "a", "i1", out="b"),
            node("Transpose", "b", perm=[0, 2, 1], out="c"),
            node("MatMul", "b", "c", out="d"),
            node("MatMul", "c", "k", out="e"),
            node("Mul", "d", "half", out="h"),
            node("Add", "e", "h"),
        ],
        X2,
        {"w": floats(24, 10), "i1": np.array([1]), "k": floats(1, 1)},
        (3, 24),
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_operators(run_node: Callable[..., str], tmp_path: Path, name: str) -> None:
    nodes, given, constants, shape = PARTS[name]
    numbers = {key: np.float32(value) for key, value in NUMBERS.items()}
    read = {name for each in nodes for name in each.input}
    constants = {key: x for key, x in (numbers | constants).items() if key in read}
    folder = web(tmp_path, nodes, [given], constants)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    found, _ = run_web(run_node, folder, {"x": x})
    for level, values in zip(LEVELS, found, strict=True):
        opened = session(tmp_path / "net.safetensors", tmp_path / "net.onnx", level=level)
        expected = opened.run(None, {"x": x})[0]
        np.testing.assert_allclose(values, expected.ravel(), atol=NEAR, rtol=NEAR)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["BF16", "F16"])
def test_weights_of_16_bits(run_node: Callable[..., str], tmp_path: Path, dtype: Any) -> None:
    """The graph computes in float32; with elsa-format/run so do the kernels."""
    w = floats(24, 10).astype(dtype)
    constants = {"w": w.astype(np.float32)}
    folder = web(tmp_path, [node("MatMul", "x", "w")], [X2], constants)
    template, packed = tmp_path / "m.onnx", tmp_path / "half.safetensors"
    elsa_format.pack({"w": w}, packed, sparsities=[80, 50])
    export_web(packed, template, folder, force=True)
    x = floats(3, 24)
    found, _ = run_web(run_node, folder, {"x": x})
    with elsa_format.open(packed) as file:
        for level, values in zip(LEVELS, found, strict=True):
            expected = x @ file.load(level)["w"].astype(np.float32)
            np.testing.assert_allclose(values, expected.ravel(), atol=NEAR)


def test_an_operator_it_does_not_know(run_node: Callable[..., str], tmp_path: Path) -> None:
    """One clear error that names it; or else ONNX Runtime computes, with the same tensors."""
    nodes = [node("MatMul", "x", "w", out="a"), node("Round", "a", out="b"), node("Sign", "b")]
    folder = web(tmp_path, nodes, [X2], {"w": floats(24, 10)})
    x = floats(2, 24)
    with pytest.raises(AssertionError, match=r"no operator Round, Sign; give \{ fallback: ort \}"):
        run_web(run_node, folder, {"x": x})
    found, given = run_web(run_node, folder, {"x": x}, fallback=True)
    assert found == [[True]] * 3
    assert given == [["elsa.w", 960]] * 3
