"""Two installed versions against each other: `python -m benchmarks.versions OLD NEW [CALL ...]`.

OLD and NEW are their Pythons. Both run the same calls in turn, each in a process of its own, so
that whatever else the machine does meets both. What counts is the least CPU time of each, in all
threads: on a busy machine it says more than the clock. Prints the ratio new : old.
"""

import os
import subprocess
import sys
import tempfile

MEBIBYTES = 128
ROUNDS = 15

WORKER = """
import io, os, sys, time, warnings
warnings.simplefilter("ignore")
import numpy as np
import elsa_format as elsa
os.fsync = lambda fd: None  # the disk is not what is compared
size = int(sys.argv[1]) << 20
if not os.path.exists("net.safetensors"):
    rng = np.random.default_rng(0)
    shape = (size // 4 // 16 // 1024, 1024)
    dense = {f"layer{i:02}": rng.standard_normal(shape).astype(np.float32) for i in range(16)}
    counters = {n: rng.integers(0, 4, a.shape).astype(np.uint8) for n, a in dense.items()}
    np.savez("counters.npz", **counters)
    np.savez("dense.npz", **dense)
    elsa.pack(dense, "net.safetensors", sparsities=[95, 90, 80])
    elsa.extract("net.safetensors", "dense.safetensors", level="dense")
    elsa.extract("net.safetensors", "bitmask.safetensors", level=2, layout="bitmask")
    elsa.pack({f"t{i}": rng.standard_normal((8, 8)).astype(np.float32) for i in range(2000)},
              "many.safetensors", sparsities=[90, 80])
file, many = elsa.open("net.safetensors"), elsa.open("many.safetensors")
out = dict(force=True)
CALLS = {
    "open": lambda: elsa.open("many.safetensors"),
    "load, 2000 small tensors": lambda: many.load(1),
    "load a level": lambda: file.load(2),
    "load as bitmask": lambda: file.load(2, "bitmask"),
    "load as csr": lambda: file.load(2, "csr"),
    "one tensor": lambda: file.tensor("layer07", 2),
    "stream": lambda: dict(elsa.stream("net.safetensors", level=2)),
    "extract": lambda: elsa.extract("net.safetensors", "out.safetensors", level=2, **out),
    "extract, bitmask": lambda: elsa.extract(
        "net.safetensors", "out.safetensors", level=2, layout="bitmask", **out),
    "extract, 2000 small tensors": lambda: elsa.extract(
        "many.safetensors", "out.safetensors", level=1, **out),
    "keep levels": lambda: elsa.extract(
        "net.safetensors", "out.safetensors", level=2, keep_levels=True, **out),
    "load_level, bitmask": lambda: elsa.load_level("bitmask.safetensors", verify=False),
    "verify": lambda: elsa.verify("net.safetensors"),
    "pack one-shot": lambda: elsa.pack(
        "dense.safetensors", "out.safetensors", sparsities=[95, 90, 80], **out),
    "pack counters": lambda: elsa.pack(
        "dense.safetensors", "out.safetensors", counters="counters.npz", digests=False, **out),
}
print(*CALLS, sep="\\t", flush=True)
for line in sys.stdin:
    call = CALLS[line.strip()]
    start = time.process_time()
    call()
    print(time.process_time() - start, flush=True)
"""


class Version:
    """An installed version, waiting for calls."""

    def __init__(self, python: str, folder: str) -> None:
        command = [os.path.abspath(python), "-c", WORKER, str(MEBIBYTES)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )
        assert self.process.stdout is not None
        self.calls = self.process.stdout.readline().strip().split("\t")

    def time(self, call: str) -> float:
        """Seconds that a call takes."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{call}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def main() -> None:
    """Compare two versions."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = (Version(python, folder) for python in sys.argv[1:3])
        for call in sys.argv[3:] or old.calls:
            times: dict[Version, list[float]] = {old: [], new: []}
            for round_number in range(ROUNDS):
                for version in (old, new)[:: -1 if round_number % 2 else 1]:
                    times[version].append(version.time(call))
            before, after = min(times[old]), min(times[new])
            print(f"{call:30} {before * 1e3:9.2f} ms {after * 1e3:9.2f} ms {after / before:6.2f}")


if __name__ == "__main__":
    main()
