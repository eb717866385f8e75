"""The same networks by others: ONNX Runtime in 8 bits, OpenVINO, products of torch and scipy."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _networks import Network

Run = Callable[[], Any]
_OPENVINO: dict[str, dict[str, Any]] = {
    "OpenVINO, dense": {},
    "OpenVINO, sparse weights": {"CPU_SPARSE_WEIGHTS_DECOMPRESSION_RATE": 0.5},
    "OpenVINO, dense in bfloat16": {"INFERENCE_PRECISION_HINT": "bf16"},
}
"""Settings; by itself it computes in bfloat16 where the processor can."""
OTHERS = (*_OPENVINO, "torch CSR", "scipy CSR")


def _module(name: str) -> Any:
    """A package that not everybody has, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def int8(net: Network, dense: bytes, folder: Path) -> str:
    """The dense network in 8 bits, as ONNX Runtime's own tool makes it."""
    quantization = importlib.import_module("onnxruntime.quantization")
    source, target = folder / "dense.onnx", folder / "int8.onnx"
    source.write_bytes(dense)
    if len(next(iter(net.feeds.values())).shape) < 4:
        quantization.quantize_dynamic(source, target, weight_type=quantization.QuantType.QInt8)
        return str(target)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        left = 2

        def get_next(self) -> Any:
            self.left -= 1
            return net.feeds if self.left >= 0 else None

    quantization.quantize_static(source, target, Reader(), per_channel=True)
    return str(target)


def openvino_runs(net: Network, dense: bytes, folder: Path) -> dict[str, Run]:
    """OpenVINO in float32, with its setting for sparse weights, and in bfloat16."""
    openvino = _module("openvino")
    if openvino is None:
        return {}
    (folder / "net.onnx").write_bytes(dense)
    runs: dict[str, Run] = {}
    for name, more in _OPENVINO.items():
        settings = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"} | more
        model = openvino.Core().compile_model(folder / "net.onnx", "CPU", settings)
        shaped = {k: openvino.Tensor(v) for k, v in net.feeds.items()}
        runs[name] = lambda m=model, f=shaped: m(f)  # type: ignore[misc]
    return runs


def matrix_runs(net: Network) -> dict[str, Run]:
    """Compressed rows in torch and scipy, for networks that are nothing but products."""
    kinds = {node.op_type for node in net.nodes}
    if not kinds <= {"MatMul", "Add", "Relu"}:
        return {}
    matrices = [a.T for name, a in net.arrays.items() if name.startswith("w")]
    x = next(iter(net.feeds.values())).T
    runs: dict[str, Run] = {}
    for name, library in (("torch CSR", _module("torch")), ("scipy CSR", _module("scipy.sparse"))):
        if library is None:
            continue
        if name == "torch CSR":
            library.set_num_threads(1)
            rows = [library.from_numpy(m.copy()).to_sparse_csr() for m in matrices]
            start: Any = library.from_numpy(x.copy())
        else:
            rows, start = [library.csr_array(m) for m in matrices], x

        def run(rows: Any = rows, start: Any = start) -> Any:
            y = start
            for matrix in rows:
                y = (matrix @ y).clip(min=0)
            return y

        runs[name] = run
    return runs
