"""A package that this project knows nothing of: a kind of checkpoint, and a command."""

import csv
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from numpy.typing import NDArray

import elsa_format
from elsa_format.cli import (
    JSON,
    OUTPUT,
    QUIET,
    SETTINGS,
    VERSION,
    level_options,
    one_level,
    progress,
    report,
    reports_errors,
)
from elsa_format.plugins import (
    DTYPES,
    Checkpoint,
    LevelReader,
    Meter,
    TensorInfo,
    choose_level,
    open_network,
    open_output,
)

MAGIC = b"#acme"


class CsvCheckpoint(Checkpoint):
    """A matrix in a text file that says that it is one."""

    @classmethod
    def matches(cls, path: str, first: bytes) -> bool:
        return first.startswith(MAGIC)

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        with open(path, newline="") as file:
            next(file)
            self._rows = [[float(cell) for cell in row] for row in csv.reader(file)]
        if len({len(row) for row in self._rows}) != 1:
            raise elsa_format.InvalidCheckpoint(f"{path}: rows of different lengths")
        self.tensors = {
            "matrix": TensorInfo("matrix", DTYPES["F32"], (len(self._rows), len(self._rows[0])))
        }
        self.metadata = {"origin": "acme"}

    def blocks(self, name: str, size: int) -> Iterator[NDArray[np.uint8]]:
        content = np.array(self._rows, np.float32).reshape(-1).view(np.uint8)
        for at in range(0, content.size, size):
            yield content[at : at + size]


@click.command("sums", context_settings=SETTINGS)
@click.argument("source")
@level_options
@OUTPUT
@JSON
@QUIET
@VERSION
@reports_errors
def sums(source: str, target: str, as_json: bool, quiet: bool, **options: object) -> None:
    """Write the sum of each tensor of a level as a text file."""
    one_level(options)
    with open_network(source, sequential=True) as network, progress("adding", quiet=quiet) as shown:
        level = choose_level(network, **options)  # type: ignore[arg-type]
        meter = Meter(shown, network.header.data_size)
        lines = []
        with LevelReader(network, on_bytes=meter.tick) as reader:
            for step in network.plan(level):
                if step.name is None:
                    reader.skip(step.info)
                else:
                    lines.append(f"{step.name} {reader.array(step).sum():.3f}\n")
            reader.finish()
        with open_output(target, in_order=True) as output:
            output.write_at(0, "".join(lines).encode())
            output.commit()
    told = {"level": level, "tensors": len(lines)}
    report(told, f"{target}: {len(lines)} sums", target, as_json=as_json, quiet=quiet)
