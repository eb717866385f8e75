"""Measure the limits in docs/limits.md: `python -m fuzz.limits FOLDER [CASE ...]`.

The case `huge` writes 40 GiB and is left out unless it is named.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from internals import DTYPES, MAX_HEADER, import_line, lay_out, serialize

from elsa_format import TensorInfo

RUN = f"""
import sys
{import_line("main")}
try:
    main(sys.argv[1:])
except SystemExit as end:
    code = end.code
peak = [line.split()[1] for line in open("/proc/self/status") if "VmHWM" in line][0]
sys.stderr.write(f"\\n{{peak}}")
sys.exit(code)
"""


def measure(*words: object) -> None:
    """Run a command; print its exit code, seconds of CPU and peak of memory."""
    shown = " ".join(str(w) if len(str(w)) < 40 else f"{str(w)[:20]}…" for w in words)
    begin, before = time.monotonic(), _child_seconds()
    command = [sys.executable, "-c", RUN, *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    cpu, wall = _child_seconds() - before, time.monotonic() - begin
    *message, peak = done.stderr.decode().splitlines()
    mib = int(peak) / 1024
    print(f"{shown}: exit {done.returncode}, {cpu:.1f} s CPU, {wall:.1f} s, {mib:.0f} MiB", end="")
    print(f"  {message[0][:150]}" if done.returncode else "", flush=True)


def _child_seconds() -> float:
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def store(path: Path, infos: list[TensorInfo], data: Any) -> None:
    """A plain checkpoint whose data section begins with `data`, and is zero after it."""
    header = serialize(lay_out(infos), {})
    with open(path, "wb") as file:
        file.write(header)
        file.write(data)
        file.truncate(len(header) + sum(info.nbytes for info in infos))


def tensors(folder: Path) -> None:
    """100,000 tensors of 32 weights."""
    weights = np.random.default_rng(0).standard_normal((100_000, 4, 8)).astype(np.float32)
    infos = [TensorInfo(f"model.layers.{i:06}.weight", DTYPES["F32"], (4, 8)) for i in range(10**5)]
    store(folder / "dense.safetensors", infos, weights)
    net = folder / "net.safetensors"
    measure("pack", folder / "dense.safetensors", "--sparsities", "95,90,80", "-f", "-o", net)
    measure("inspect", net)
    measure("verify", net)
    for layout in ("dense", "bitmask", "csr"):
        out = folder / "level.safetensors"
        measure("extract", net, "--level", 2, "--layout", layout, "-f", "-o", out)


def header(folder: Path) -> None:
    """A header of 100 MB that is valid, and some that are not."""
    profile = '{"version":"1.0","bits":1,"levels":[{"name":"a","nonzero":0}],"nested":{}}'
    first = f'"__metadata__":{{"elsa":{json.dumps(profile)}}}'
    entry = ',"t{:07}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    count = (MAX_HEADER - len(first) - 2) // len(entry.format(0))
    texts = {
        f"{count} tensors": "{" + first + "".join(map(entry.format, range(count))) + "}",
        "empty lists": '{"a":[' + "[]," * 33_000_000 + "[]]}",
        "a long shape": '{"a":{"dtype":"U8","data_offsets":[0,0],"shape":['
        + "0," * 49 * 10**6
        + "0]}}",
        "a key twice": "{" + "".join(f'"{i}":0,' for i in range(8 * 10**6)) + '"0":0}',
        "a long name": '{"' + "a" * 99 * 10**6 + '":1}',
        "a deep nest": '{"a":' + "[" * 49 * 10**6 + "]" * 49 * 10**6 + "}",
    }
    for kind, text in texts.items():
        path = folder / "header.safetensors"
        path.write_bytes(MAX_HEADER.to_bytes(8, "little") + text.encode().ljust(MAX_HEADER))
        print(f"{kind}: ", end="", flush=True)
        measure("verify", path)
        path.unlink()


def levels(folder: Path) -> None:
    """T = 255 in F32 and T = 127 (τ = 7) in BF16, in a network of 25.6 million weights."""
    weights = np.random.default_rng(0).standard_normal(160 * 400 * 400).astype(np.float32)
    for dtype, count, data in (
        ("F32", 255, weights),
        ("BF16", 127, weights.astype(ml_dtypes.bfloat16).view(np.uint16)),
    ):
        infos = [TensorInfo(f"layer{i:03}", DTYPES[dtype], (400, 400)) for i in range(160)]
        store(folder / "dense.safetensors", infos, data)
        net = folder / "net.safetensors"
        sparsities = ",".join(f"{99.9 - 89 * t / count:.3f}" for t in range(count))
        measure("pack", folder / "dense.safetensors", "--sparsities", sparsities, "-f", "-o", net)
        measure("inspect", net)
        measure("verify", net)
        for layout in ("dense", "bitmask", "csr"):
            measure("extract", net, "--level", 100, "--layout", layout, "-o", "/dev/null")


def huge(folder: Path) -> None:
    """40 GiB with holes: 40 tensors of 1 GiB."""
    infos = [TensorInfo(f"layer{i:02}", DTYPES["F32"], (1 << 14, 1 << 14)) for i in range(40)]
    dense, net = folder / "huge.safetensors", folder / "hugenet.safetensors"
    store(dense, infos, np.random.default_rng(0).standard_normal(1 << 26).astype(np.float32))
    measure("pack", dense, "--sparsities", "99.8,99.7,99.5", "-f", "-o", net)
    dense.unlink()
    measure("inspect", net)
    measure("verify", net)
    for layout in ("dense", "bitmask", "csr"):
        measure("extract", net, "--level", 2, "--layout", layout, "-o", "/dev/null")
    net.unlink()


CASES: dict[str, Callable[[Path], None]] = {
    case.__name__: case for case in (tensors, header, levels, huge)
}


def main() -> None:
    """Run cases in a folder."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.limits", description=__doc__)
    parser.add_argument("folder", type=Path, help="where files may be written")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    given = parser.parse_args()
    if unknown := set(given.cases) - set(CASES):
        parser.error(f"no case {min(unknown)!r}; there are {', '.join(CASES)}")
    given.folder.mkdir(exist_ok=True)
    for case in given.cases or ["tensors", "header", "levels"]:
        print(CASES[case].__doc__)
        CASES[case](given.folder)


if __name__ == "__main__":
    main()
