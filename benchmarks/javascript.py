"""The JavaScript package in Node.js, against the least that the runtime can do.

    python benchmarks/javascript.py [--quick]

Loading is compared with collecting the same answer of a server on this machine, in turn in one
process; what counts is the time for which processors worked, so that others who are busy do not
matter. Deliveries are compared with a line of 100 Mbit/s, on which they should not have to wait for
the decoder.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import elsa_format

ROOT = Path(__file__).resolve().parents[1]
LINE = 12.5
"""MB/s of a line of 100 Mbit/s."""


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="small files, few repeats")
    options = parser.parse_args()
    node = shutil.which("node")
    if node is None:
        sys.exit("Node.js is not installed")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path()) as folder:
        files = make_files(Path(folder), 16 if options.quick else 256)
        seconds = "0.2" if options.quick else "2"
        command = [node, str(ROOT / "js" / "bench.mjs"), *map(str, files), seconds]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    print_tables(json.loads(done.stdout))


def make_files(folder: Path, megabytes: int) -> list[Path]:
    """An ELSA file, and two smaller networks as delivery files."""
    rng = np.random.default_rng(0)
    layers = {
        f"layer{i}": rng.standard_normal((1024, 1024)).astype(np.float32)
        for i in range(megabytes // 4)
    }
    files = [folder / "net.safetensors"]
    elsa_format.pack(layers, files[0], sparsities=[95, 90, 80])
    # Without elsa_format.ship, the plain Writer of the specification takes long.
    rows = 2048 if hasattr(elsa_format, "ship") else 512
    for name, dtype in (("f32", np.float32), ("bf16", ml_dtypes.bfloat16)):
        weights = (rng.standard_normal((rows, 1024)) * 0.05).astype(dtype)
        elsa_format.pack({"w": weights}, folder / name, sparsities=[95, 90, 80])
        files.append(folder / f"{name}.ship.safetensors")
        ship(folder / name, files[-1])
    return files


def ship(source: Path, target: Path) -> None:
    """A delivery file of an ELSA file."""
    if hasattr(elsa_format, "ship"):
        elsa_format.ship(source, target)
        return
    sys.path.insert(0, str(ROOT))
    from spec import plain_delivery

    target.write_bytes(plain_delivery.ship(source.read_bytes()))


def print_tables(found: dict[str, object]) -> None:
    """What was measured, with the targets."""
    load, collect, buffer = (float(found[key]) for key in ("load", "collect", "buffer"))  # type: ignore[arg-type]
    wasm, plain, extract = (found[key] for key in ("wasm", "plain", "extract"))
    assert isinstance(wasm, dict)
    assert isinstance(plain, dict)
    assert isinstance(extract, dict)
    print(f"Node.js {found['version']}, a file of {found['megabytes']:.0f} MB over HTTP:\n")
    print("| what | against | ms of work | the other's | ratio | target |")
    print("| --- | --- | ---: | ---: | ---: | --- |")
    row = f"| load a level, checksums compared | %s | {load:.0f} | %.0f | %.2f × | %s |"
    print(row % ("collecting the same answer", collect, load / collect, "≤ 1.5 ×"))
    print(row % ("`arrayBuffer()`", buffer, load / buffer, "≤ 1 ×"))
    print("\n| what | WebAssembly | plain JavaScript | target |\n| --- | ---: | ---: | --- |")
    for layout, rate in extract.items():
        target = "≥ 1 GB/s" if layout == "dense" else ""
        print(f"| extract from memory, {layout} | {rate:.2f} GB/s | | {target} |")
    for name, rate in wasm.items():
        if name.startswith("delivery"):
            targets = {
                "delivery, F32, level 1": "≥ 3 ×, plain",
                "delivery, BF16, level 1": "≥ 2 ×, plain",
            }
            times = f"{rate / LINE:.1f} × 100 Mbit/s | {plain[name] / LINE:.1f} × 100 Mbit/s"
            print(f"| {name} | {times} | {targets.get(name, '')} |")
        else:
            print(f"| {name} | {rate:.2f} GB/s | {plain[name]:.2f} GB/s | |")


if __name__ == "__main__":
    main()
