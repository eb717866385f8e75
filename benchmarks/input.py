"""Pictures a second that reach the training loop, against what the decoder can do.

    python benchmarks/input.py [--folder DIR] [--workers 1,2] [--quick]

All ways take turns in one run. The limit is Pillow alone, on the same pictures: open, cut, resize,
in as many plain processes. Two rates are given: by the clock (the fastest round), and by the
processor time of all processes (of all rounds), which others on the machine change less. Grain is
measured if it is installed (`pip install grain`), as it is mostly used: a batch is a worker's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from elsa_train.data.images import ImageFolder, center_crop
from elsa_train.data.workers import Workers

SIZE, QUALITY, COUNT = (500, 375), 90, 256
PLAIN = """
import sys
from benchmarks.input import plain
names = sys.stdin.readline().split("\\0")[:-1]
while line := sys.stdin.readline():
    plain(names, int(line))
    print("done", flush=True)
"""
WANTED, REPEATS = 24_000, 2


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="train/ and val/ of JPEGs; else 256 are made")
    parser.add_argument("--workers", default="1,2", help="numbers of processes")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="three rounds of few pictures")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.batch_size = 3, 64
    counts = [int(count) for count in options.workers.split(",")]
    with tempfile.TemporaryDirectory() as made:
        if options.folder is None:
            make_folder(Path(made))
        measure(options.folder or Path(made), counts, options.batch_size, options.rounds)


def make_folder(root: Path) -> None:
    """Make pictures of ImageNet's usual size whose details fall off with their scale."""
    rng = np.random.default_rng(0)
    for split, count in (("train", COUNT), ("val", 1)):
        (root / split / "one").mkdir(parents=True)
        for number in range(count):
            picture = np.full((SIZE[1], SIZE[0], 3), 128.0)
            for scale in (1, 2, 4, 8, 16, 32, 64):
                small = (SIZE[1] // scale + 2, SIZE[0] // scale + 2)
                for channel in range(3):
                    noise = Image.fromarray(rng.standard_normal(small, np.float32))
                    picture[..., channel] += 4 * scale**0.75 * np.asarray(noise.resize(SIZE))
            image = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
            image.save(root / split / "one" / f"{number:04}.JPEG", quality=QUALITY)


def plain(names: list[str], count: int) -> None:
    """Decode pictures with Pillow alone, as evaluation does: no drawing of boxes, no batch."""
    for number in range(count):
        with Image.open(names[number % len(names)]) as image:
            box = center_crop(*image.size)
            image.resize((224, 224), Image.Resampling.BICUBIC, box=box).load()


class Times(NamedTuple):
    """Seconds by the clock, and of processor time in this process and in those it started."""

    wall: float
    here: float
    children: float


class Plain:
    """Processes that decode with Pillow alone, all at the same time."""

    def __init__(self, names: list[str], processes: int) -> None:
        """Start them."""
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-c", PLAIN],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(processes)
        ]
        for process in self._processes:
            self._tell(process, "".join(f"{name}\0" for name in names))

    def _tell(self, process: "subprocess.Popen[str]", line: str) -> None:
        assert process.stdin
        process.stdin.write(f"{line}\n")
        process.stdin.flush()

    def __call__(self, count: int) -> None:
        """Decode pictures, each process its share."""
        for process in self._processes:
            self._tell(process, str(count // len(self._processes)))
        for process in self._processes:
            assert process.stdout
            process.stdout.readline()

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.communicate()


class Chunk:
    """What Grain maps: the number of a chunk to its pictures, with the same decoder."""

    def __init__(self, root: Path, size: int) -> None:
        """Take the folder, not its files: they are listed in the worker."""
        self._root, self._size, self._data = root, size, None

    def __call__(self, number: int) -> Any:
        """Decode the pictures of a chunk."""
        if self._data is None:
            self._data: Any = ImageFolder(self._root)
            self._data._threads = 1
        first = number * self._size
        indices = np.arange(first, first + self._size) % self._data.size("train")
        return self._data.batch("train", indices, 0)


def take_from_grain(root: Path, processes: int, size: int, rounds: int) -> list[Times]:
    """Time batches of Grain's processes, in a row: it makes some ahead while it is not asked."""
    import grain
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["input"])
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
    chunks = grain.MapDataset.range(1 << 30).map(Chunk(root, size)).to_iter_dataset(options)
    began = time.perf_counter()
    batches = iter(chunks.mp_prefetch(grain.MultiprocessingOptions(processes)))
    next(batches)
    print(f"\nGrain takes {time.perf_counter() - began:.1f} s to its first batch, of {processes}")
    for _ in range(8 * processes):
        next(batches)
    return [timed(lambda: next(batches)) for _ in range(rounds)]


def timed(make: Callable[[], Any]) -> Times:
    """Take some batches."""
    children = children_time()
    wall, here = time.perf_counter(), time.process_time()
    for _ in range(REPEATS):
        make()
    wall, here = time.perf_counter() - wall, time.process_time() - here
    return Times(wall, here, children_time() - children)


def children_time() -> float:
    """Return the seconds of processor time that the processes started here have taken."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            ticks += (int(fields[11]) + int(fields[12])) * (int(fields[1]) == os.getpid())
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(root: Path, counts: list[int], size: int, rounds: int) -> None:
    """Take turns, and print minima."""
    folder = ImageFolder(root)
    alone = ImageFolder(root)
    alone._threads = 1
    indices = np.arange(size) % folder.size("train")
    names = [folder._examples["train"][index].content for index in range(folder.size("train"))]
    plain_ones = {count: Plain(names, count) for count in counts}
    workers = {count: Workers(folder, count) for count in counts}
    makers: dict[str, Callable[[], Any]] = {}
    for count in counts:
        several = f"{count} process" + "es" * (count > 1)
        makers[f"Pillow alone, {several}"] = partial(plain_ones[count], size)
        makers[f"workers, {several}"] = partial(workers[count].batch, "train", indices, 0)
    makers["one process, one thread"] = partial(alone.batch, "train", indices, 0)
    makers[f"one process, {os.cpu_count()} threads"] = partial(folder.batch, "train", indices, 0)
    times: dict[str, list[Times]] = {name: [] for name in makers}
    for turn in range(rounds + 1):
        for name in sorted(makers, reverse=bool(turn % 2)):
            found = timed(makers[name])
            if turn:
                times[name].append(found)
    for opened in (*plain_ones.values(), *workers.values()):
        opened.close()
    if find_spec("grain"):
        for count in counts:
            name = f"Grain, {count} process" + "es" * (count > 1)
            times[name] = take_from_grain(root, count, size, rounds)
    show(times, size * REPEATS)


def show(times: dict[str, list[Times]], count: int) -> None:
    """Print the table; each entry took as many pictures."""
    first = min(name for name in times if name.startswith("Pillow"))
    limit = count / min(found.wall for found in times[first])
    print("| what | pictures/s | of Pillow alone, 1 process | a second of a core | here, µs each |")
    print("| --- | --- | --- | --- | --- |")
    here = {name: 1e6 * np.mean([t.here for t in found]) / count for name, found in times.items()}
    for name, found in times.items():
        rate = count / min(t.wall for t in found)
        core = count / np.mean([t.here + t.children for t in found])
        print(f"| {name} | {rate:.0f} | {rate / limit:.2f} | {core:.0f} | {here[name]:.0f} |")
    core = count / np.mean([t.here + t.children for t in times[first]])
    least = min(micro for name, micro in here.items() if name.startswith("workers"))
    print(
        f"\n{WANTED} pictures a second: {WANTED / core:.0f} such cores that decode, and "
        f"{WANTED * least / 1e6:.2f} of one in the process that trains"
    )


if __name__ == "__main__":
    main()
