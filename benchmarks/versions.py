"""Two versions against each other, row by row: `python -m benchmarks.versions OLD NEW`.

OLD and NEW are checkouts, each with its own .venv:

    git worktree add ../old REVISION && make -C ../old .venv/ready
    .venv/bin/python -m benchmarks.versions ../old . --only 'pack.*'

The rows are those of `make bench` about the format, which both versions have, beside the ONNX
converter and some calls more. Each version waits in a process of its own, and they run in turn, the
other first each time, so that whatever else the machine does meets both. What counts is the least
CPU time of each, in all threads, or the peak memory. A row whose peer is not installed is left out.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

if not __package__:  # a worker, which is run as a script
    import _private  # noqa: F401 - finds internals

from internals import import_line

AREAS = ("load", "stream", "pack", "layouts", "kernels", "growth")
IMPORTS = {
    "import.open": "import elsa_format; elsa_format.open",
    "import.pack": "import elsa_format; elsa_format.pack",
    "import.command": import_line("_extract_command"),
}
ONNX_MIB = 64
FEWEST = 5
"""Rounds that each row has, however long they take."""


class Worker:
    """What a version can do; runs in its Python and its checkout."""

    def __init__(self, folder: Path, size: int, largest: int) -> None:
        self.rows = import_module("benchmarks._rows")
        self.rows.always_fresh_memory()
        for area in AREAS:
            import_module(f"benchmarks.{area}")
        self.folder = folder
        self.files = import_module("benchmarks._files").Files(folder, size, largest)
        self.prepare: dict[str, Callable[[], Any]] = {}
        seen = set()
        for row in self.rows.ROWS:  # the same call may have several peers
            if row.what not in seen and "safetensors" not in row.what:
                self.prepare[row.key] = lambda row=row: row.prepare(self.files)
            seen.add(row.what)
        for name in CALLS:
            self.prepare[f"calls.{name}"] = lambda name=name: self.call(CALLS, name)
        for name in EXPORTS:
            self.prepare[f"onnx.{name}"] = lambda name=name: self.call(EXPORTS, name)

    def call(self, calls: dict[str, str], name: str) -> Any:
        """One of the calls below, its files made by the first of them."""
        make = MAKE_ONNX if calls is EXPORTS else MAKE
        names: dict[str, Any] = {"folder": self.folder, "files": self.files, "MIB": ONNX_MIB}
        exec(make, names)
        subject = eval(f"lambda: {calls[name]}", names)
        return self.rows.Race(self.rows.unsynced(subject), self.rows.nothing, 1)

    def serve(self) -> None:
        """Measure each row that a line names: seconds or bytes; the last one stays prepared."""
        print(*self.prepare, sep="\t", flush=True)
        key, prepared = "", None
        for line in sys.stdin:
            try:
                if line.strip() != key:
                    key, prepared = line.strip(), None  # gives its memory back
                    prepared = self.prepare[key]()
                print(*self.measure(prepared), sep="\t", flush=True)
            except self.rows.Unavailable as reason:
                print("-", reason, sep="\t", flush=True)

    def measure(self, prepared: Any) -> tuple[str, float]:
        """The unit and the number."""
        if isinstance(prepared, self.rows.Peak):
            return "MiB", self.rows.peak_memory(prepared) / self.rows.MIB
        start = time.process_time()
        result = prepared.subject()
        took = time.process_time() - start
        del result
        prepared.after()
        return "ms", took * 1e3


MAKE = """
import numpy as np, elsa_format as elsa
net, many = files.elsa(), folder / "many.safetensors"
out, level = folder / "out.safetensors", folder / "level.safetensors"
if not many.exists():
    rng = np.random.default_rng(0)
    elsa.pack({f"t{i}": rng.standard_normal((8, 8)).astype(np.float32) for i in range(2000)}, many,
              sparsities=[90, 80])
    elsa.extract(net, level, level=2, layout="bitmask")
file, small = elsa.open(net), elsa.open(many)
name = next(iter(file.nested))
held = {layout: file.load(2, layout)[name] for layout in ("bitmask", "csr")}
def extract(source, **options): return elsa.extract(source, out, force=True, **options)
"""
CALLS = {
    "open, 2000 tensors": "elsa.open(many)",
    "sizes, 2000 tensors": "[elsa.open(many).size(2, x) for x in ('dense', 'bitmask', 'csr')]",
    "load, 2000 tensors": "small.load(1)",
    "extract, 2000 tensors": "extract(many, level=1)",
    "one tensor": "file.tensor(name, 2)",
    "bitmask to dense": "held['bitmask'].to_dense()",
    "csr to dense": "held['csr'].to_dense()",
    "keep levels": "extract(net, level=2, keep_levels=True)",
    "load_level, bitmask": "elsa.load_level(level, verify=False)",
    "load_level, digest": "elsa.load_level(level)",
    "verify": "elsa.verify(net)",
}

MAKE_ONNX = """
import elsa_format
from benchmarks.onnx_export import make_model
from elsa_converters.onnx import (
    OnnxCheckpoint, all_levels_session, export, export_all_levels, session)
model, packed, graph, levels, out = (folder / f"onnx-{n}" for n in (
    "model.onnx", "net.safetensors", "net.onnx", "levels.onnx", "out.onnx"))
if not model.exists():
    make_model(model, MIB)
    checkpoint = OnnxCheckpoint(model)
    elsa_format.pack(checkpoint, packed, sparsities=[95, 90, 80])
    checkpoint.write_template(graph, packed)
    export_all_levels(packed, graph, levels)
def written(source, **options): return export(packed, source, out, level=2, force=True, **options)
"""
EXPORTS = {
    "export, template": "written(graph)",
    "export, model": "written(model)",
    "export, sparse": "written(graph, sparse=True)",
    "export, fold": "written(graph, fold=True)",
    "session": "session(packed, graph, level=2)",
    "session of all levels": "all_levels_session(levels, level=2)",
}


class Version:
    """A checkout whose worker waits."""

    def __init__(self, checkout: Path, scratch: Path, sizes: tuple[int, int]) -> None:
        self.checkout, self.python = checkout, str(checkout / ".venv" / "bin" / "python")
        arguments = [str(scratch), *map(str, sizes)]
        self.process = subprocess.Popen(
            [self.python, os.path.abspath(__file__), "--worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,
        )
        self.rows = [*IMPORTS, *self._answer()]

    @property
    def packages(self) -> set[str]:
        """What is installed: packing looks through all of it for plug-ins, so it costs time."""
        program = (
            "from importlib.metadata import distributions\n"
            "for d in distributions(): print(d.name, d.version)"
        )
        done = subprocess.run([self.python, "-c", program], stdout=subprocess.PIPE, check=True)
        return set(done.stdout.decode().splitlines())

    def _answer(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip().split("\t")

    def measure(self, key: str) -> tuple[str, str]:
        """The unit and the number; "-" and a reason if it cannot be had."""
        if key in IMPORTS:
            program = f"import time; {IMPORTS[key]}; print(time.process_time())"
            command = [self.python, "-c", program]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=self.checkout)
            return "ms", str(float(done.stdout) * 1e3)
        assert self.process.stdin is not None
        self.process.stdin.write(f"{key}\n")
        self.process.stdin.flush()
        unit, value = self._answer()
        return unit, value

    def end(self) -> None:
        """Let the worker go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(old: Version, new: Version, key: str, seconds: float) -> str:
    """One row of the table."""
    least: dict[Version, float] = {}
    unit, began, rounds = "", time.perf_counter(), 0
    while rounds < FEWEST or time.perf_counter() - began < seconds:
        for version in (new, old) if rounds % 2 else (old, new):
            unit, value = version.measure(key)
            if unit == "-":
                return f"| {key} | | | {value} |"
            least[version] = min(least.get(version, float("inf")), float(value))
        rounds += 1
    before, after = least[old], least[new]
    return f"| {key} | {before:.4g} {unit} | {after:.4g} {unit} | {after / before:.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versions", description=__doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="e.g. 'load.*'")
    parser.add_argument("--size", type=int, default=128, help="MiB of most files")
    parser.add_argument("--largest", type=int, default=512, help="MiB of the largest file")
    parser.add_argument("--seconds", type=float, default=10, help="for each row")
    options = parser.parse_args()
    with ExitStack() as stack:
        versions = []
        for checkout in (options.old, options.new):
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix=".versions-", dir="."))
            sizes = options.size << 20, options.largest << 20
            versions.append(Version(checkout.resolve(), Path(scratch).resolve(), sizes))
            stack.callback(versions[-1].end)
        old, new = versions
        if differing := sorted(old.packages ^ new.packages):
            print("not the same in both environments:", *differing, sep="\n  ", file=sys.stderr)
        print("| row | old | new | new : old |\n| --- | ---: | ---: | ---: |", flush=True)
        for key in old.rows:
            wanted = not options.only or any(fnmatchcase(key, glob) for glob in options.only)
            if wanted and key in new.rows:
                print(compare(old, new, key, options.seconds), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        sys.path[0] = os.getcwd()  # the rows of this version, not those beside this file
        Worker(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])).serve()
    else:
        main()
