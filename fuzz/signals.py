"""Signals at any moment, over all commands: `python -m fuzz.signals [--count N] [--seed S]`.

Whenever Ctrl-C or SIGTERM comes, a command ends at once with its exit code, says nothing, and
leaves every output as it was, or whole. Moments are random points in time and, because that is
where things go wrong, the starts of threads, imports, and files that are opened, named and removed.
"""

import argparse
import contextlib
import dataclasses
import os
import random
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from internals import import_line

import elsa_format

BIN = Path(sys.executable).parent
HANGS = 60.0
"""Seconds after which a command counts as hanging, on a busy machine too."""
TRAINS = 12.0
"""Seconds of a training that are worth interrupting: imports, compilation, steps."""

SAVED = "its state is saved"
"""What the trainer says to SIGTERM, which it may hear in the midst of a long step."""

EVENTS = {
    "_thread.start_new_thread": "thread",
    "import": "import",
    "open": "file",
    "os.link": "file",
    "os.rename": "file",
    "os.remove": "file",
}
"""Audit events of Python, and the kinds of moments they mark."""
KINDS = ("time", "thread", "import", "file")

# Loaded by the interpreter of a command before anything of ours. Counts events from when the
# command hears signals; at the n-th of a kind it sends the signal, or lets the parent send it,
# which then comes a little later. At the end it tells how many there were.
SITE = f"""
import _thread, atexit, os, signal, struct, sys, time
EVENTS = {EVENTS}
kind, at, number, tell, sends = os.environ.pop("ELSA_FUZZ_SIGNAL", "-:0:0:0:-").split(":")
at, number, tell = int(at), int(number), int(tell)
seen = dict.fromkeys(EVENTS.values(), 0)
def hook(event, arguments):
    found = EVENTS.get(event)
    if found is None or signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        return
    seen[found] += 1
    if found == kind and seen[found] == at:
        os.write(tell, struct.pack("d", time.monotonic()))
        if sends == "self":
            os.kill(os.getpid(), number)
def start_new_thread(*arguments, start=_thread.start_new_thread):
    hook("_thread.start_new_thread", ())  # no event before Python 3.12, and none afterwards
    started = start(*arguments)
    hook("_thread.start_new_thread", ())
    return started
if tell:
    sys.addaudithook(hook)
    _thread.start_new_thread = start_new_thread
    if "threading" in sys.modules:
        sys.modules["threading"]._start_new_thread = start_new_thread
    if not at:
        atexit.register(lambda: os.write(tell, struct.pack("3d", *seen.values())))
"""

# As on file systems without unnamed files: temporary ones have names.
NAMED = f"""
import sys
{import_line("_start")}
_start.end_on_signals()
{import_line("_atomic")}
_atomic._OPEN_FILES = "/nowhere"
getattr(_start, sys.argv.pop(1))()
"""


class Failure(Exception):
    """What a command did wrong."""


@dataclasses.dataclass
class Command:
    """A command line, and what a run without a signal taught about it."""

    words: tuple[str, ...]
    half: Path | None = None
    """Half of this file stands in standard input, which then neither goes on nor ends."""
    seconds: float = 1.0
    events: dict[str, int] = dataclasses.field(default_factory=dict)
    whole: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """What it writes: the same bytes every time."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a signal is sent: after some seconds, or at the n-th event of a kind."""

    kind: str
    at: float
    sends: str = "parent"


@dataclasses.dataclass(frozen=True)
class End:
    """How a command ended."""

    code: int | None
    """None if it hangs."""
    seconds: float
    """Since the signal."""
    complaint: str
    early: bool
    """The signal came before the first line of ours ran, to Python itself."""


def commands(folder: Path) -> dict[str, Command]:
    """Every command, with inputs that are made in the folder."""
    rng = np.random.default_rng(0)
    weights = {f"layer{i}": rng.standard_normal((512, 1024)).astype(np.float32) for i in range(6)}
    dense, net, index = (folder / n for n in ("dense.npz", "net.safetensors", "net.index.json"))
    np.savez(dense, **weights)  # type: ignore[arg-type]
    elsa_format.pack(dense, net, sparsities=[95, 90, 80])
    elsa_format.pack(dense, index, sparsities=[95, 90, 80], max_shard_size=4 << 20)
    shipped, level = folder / "net.ship.safetensors", folder / "level.safetensors"
    elsa_format.ship(net, shipped)
    elsa_format.extract(net, level, level=2, layout="bitmask")
    pack = ("pack", str(dense), "--sparsities", "95,90,80", "-o")
    extract = ("extract", str(net), "-l", "2", "-o", "out.safetensors")
    found = {
        "pack": Command((*pack, "out.safetensors")),
        "pack shards": Command((*pack, "o.index.json", "--max-shard-size", "4MiB", "-j", "3")),
        "extract": Command(extract),
        "extract csr": Command((*extract, "--layout", "csr")),
        "extract keep": Command((*extract, "--keep-levels")),
        "extract shards": Command(("extract", str(index), "-l1", "-o", "o.index.json", "-j", "3")),
        "extract pipe": Command(("extract", "-", "-l", "1", "-o", "out.safetensors"), net),
        "extract level": Command(("extract", str(level), "-o", "out.safetensors")),
        "extract whole": Command(("extract", str(shipped), "--restore", "-o", "out.safetensors")),
        "ship": Command(("ship", str(net), "-o", "out.ship.safetensors", "-j", "2")),
        "ship parts": Command(("ship", str(net), "--split", "-o", "out.ship.safetensors")),
        "verify": Command(("verify", str(net))),
        "verify delivery": Command(("verify", str(shipped))),
        "verify shards": Command(("verify", str(index), "-j", "3")),
        "verify pipe": Command(("verify", "-"), net),
        "inspect": Command(("inspect", str(net))),
        "inspect html": Command(("inspect", str(net), "--html", "out.html", "--full")),
    }
    if find_spec("onnx"):
        found |= _onnx_commands(folder, weights)
    if find_spec("jax"):
        short = ("--epochs", "1", "--sparsify-epochs", "1", "--densify-epochs", "1")
        found["train"] = Command(("train", "digits", *short, "--plot", "none", "--out", "run"))
    return found


def _onnx_commands(folder: Path, weights: dict[str, np.ndarray]) -> dict[str, Command]:
    import onnx
    from onnx import helper, numpy_helper

    kind, last = onnx.TensorProto.FLOAT, len(weights) - 1
    graph = helper.make_graph(
        [helper.make_node("MatMul", [f"x{i}", w], [f"x{i + 1}"]) for i, w in enumerate(weights)],
        "layers",
        [helper.make_tensor_value_info("x0", kind, ["n", "k"])],
        [helper.make_tensor_value_info(f"x{last + 1}", kind, ["n", "m"])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    model, net, template = (folder / n for n in ("m.onnx", "m.safetensors", "template.onnx"))
    imports = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), model)
    elsa_format.pack(model, net, sparsities=[95, 90], template=template)
    export = ("export", str(net), "--onnx", str(template), "-o", "out.onnx", "-l", "1")
    pack = ("pack", str(model), "--sparsities", "95,90", "-o", "out.safetensors")
    return {
        "pack onnx": Command((*pack, "--template", "out.onnx")),
        "export": Command(export),
        "export data": Command((*export, "--external-data")),
    }


class Running:
    """A process under way, to be sent signals; it ends with the block at the latest."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        half: Path | None = None,
        before: Callable[[], object] | None = None,
        stdout: int = subprocess.DEVNULL,
        **options: Any,
    ) -> None:
        """Start it, with half of a file in its standard input, which neither goes on nor ends.

        `before` is called in the process, before what it runs.
        """
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [str(word) for word in words],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=self._said,
            preexec_fn=before,
            bufsize=0,
            **options,
        )
        if half is not None:
            _feed(self.process, half)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with self.process:
            self._said.close()

    def line(self) -> bytes:
        """The next line of its standard output, if that is a pipe."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def begin_file(self, folder: Path) -> None:
        """Wait until it has a file of a folder open: an output that is begun but not finished."""
        limit = time.monotonic() + HANGS
        while not any(str(folder) in target for target in _open_files(self.process.pid)):
            if self.process.poll() is not None or time.monotonic() > limit:
                self.process.kill()
                raise Failure(f"opened no file in {folder}: {self._complaint()}")
            time.sleep(0.01)

    def end(self) -> tuple[int | None, str]:
        """Exit code, which is None of what hangs, and complaint."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(HANGS)
        return self.process.returncode, self._complaint()

    def stop(self, number: int) -> tuple[int | None, str]:
        """Exit code and complaint after a signal."""
        self.process.send_signal(number)
        return self.end()

    def _complaint(self) -> str:
        self._said.seek(0)
        return self._said.read().decode()


def _open_files(pid: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the process has ended
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                yield os.readlink(entry)


class Stress:
    """Runs commands and sends them signals."""

    def __init__(self, folder: Path, seed: int, *, only: str = "") -> None:
        self.out, self.site = folder / "out", folder / "site"
        self.rng, self.kinds = random.Random(seed), KINDS
        self.site.mkdir()
        (self.site / "sitecustomize.py").write_text(SITE)
        (folder / "inputs").mkdir()
        made = commands(folder / "inputs")
        self.commands = {name: made[name] for name in made if re.search(only, name)}
        for name, command in self.commands.items():
            self._learn(name, command)

    def _learn(self, name: str, command: Command) -> None:
        if name == "train":
            command.seconds, command.events = TRAINS, {"thread": 60, "import": 5000, "file": 2000}
            return
        self._clear()
        begin = time.monotonic()
        told, tell = os.pipe()
        done = subprocess.run(
            [BIN / "elsa", *(str(command.half) if word == "-" else word for word in command.words)],
            cwd=self.out,
            env=self._environment(Moment("-", 0), signal.SIGINT, tell),
            pass_fds=[tell],
            capture_output=True,
            text=True,
            check=False,
        )
        os.close(tell)
        if done.returncode:
            raise Failure(f"{name} does not work: {done.stderr}")
        command.seconds = time.monotonic() - begin
        seen = struct.unpack("3d", os.read(told, 24))
        command.events = dict(zip(KINDS[1:], map(int, seen), strict=True))
        os.close(told)
        command.whole = self._content()

    def once(self) -> tuple[str, End]:
        """Send a signal to some command at some moment."""
        name = self.rng.choice(list(self.commands))
        command = self.commands[name]
        number = self.rng.choice([signal.SIGINT, signal.SIGTERM])
        kind = self.rng.choice(self.kinds)
        if kind == "time":
            moment = Moment(kind, self.rng.uniform(0, command.seconds))
        else:
            at = self.rng.randint(1, max(command.events[kind], 1))
            moment = Moment(kind, at, self.rng.choice(["self", "parent"]))
        words = [str(BIN / "elsa"), *command.words]
        style = self.rng.random()
        if style < 0.6:
            words = [str(BIN / f"elsa-{command.words[0]}"), *command.words[1:]]
        if style < 0.2:
            words = [sys.executable, "-c", NAMED, *command.words]
        self._clear()
        if command.whole and self.rng.random() < 0.4:
            words.append("--force")
            for output in command.whole:
                (self.out / output).write_bytes(b"old")
        before = self._content()
        label = f"{name} ({kind} {moment.at:.4g}, {moment.sends} sends {number.name}, {style:.2f})"
        end = self._run(words, command, moment, number)
        self._check(label, command, number, end, before)
        return label, end

    def _clear(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir()

    def _content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.iterdir() if path.is_file()}

    def _environment(self, moment: Moment, number: int, tell: int) -> dict[str, str]:
        hook = f"{moment.kind}:{int(moment.at)}:{int(number)}:{tell}:{moment.sends}"
        return {**os.environ, "PYTHONPATH": str(self.site), "ELSA_FUZZ_SIGNAL": hook}

    def _run(self, words: list[str], command: Command, moment: Moment, number: int) -> End:
        told, tell = os.pipe()
        environment = self._environment(moment, number, tell)
        options: Any = {"cwd": self.out, "env": environment, "pass_fds": [tell]}
        with Running(words, half=command.half, before=hear_signals, **options) as running:
            os.close(tell)
            try:
                sent, early = self._send(running.process, command, moment, number, told)
                code, complaint = running.end()
            finally:
                os.close(told)
            return End(code, time.monotonic() - sent, complaint, early)

    def _send(
        self,
        process: "subprocess.Popen[bytes]",
        command: Command,
        moment: Moment,
        number: int,
        told: int,
    ) -> tuple[float, bool]:
        """Send the signal when its moment has come; when that was, and whether it was early."""
        if moment.kind == "time":
            _wait(process, moment.at)
        else:
            data = _listen(process, told, command.seconds + 2)
            if data and moment.sends == "self":
                return float(struct.unpack("d", data)[0]), False
        early = not hears_signals(process.pid)
        process.send_signal(number)
        return time.monotonic(), early

    def _check(
        self, label: str, command: Command, number: int, end: End, before: dict[str, bytes]
    ) -> None:
        if end.code is None:
            raise Failure(f"{label}: hangs")
        if end.early and end.code:
            return
        if end.code not in (0, 128 + number):
            raise Failure(f"{label}: exit code {end.code}: {end.complaint[-500:]!r}")
        if "Traceback" in end.complaint or "Exception ignored" in end.complaint:
            raise Failure(f"{label}: {end.complaint[-500:]!r}")
        if command.words[0] == "train":
            return
        if end.code and end.complaint:
            raise Failure(f"{label}: says {end.complaint[-500:]!r}")
        left, whole = self._content(), command.whole
        if left == whole or (end.code and left == before):
            return
        if "--template" in command.words and end.code:
            # The ELSA file is whole, and of use by itself, before its template is written.
            half = {name: left.get(name) in (before.get(name), whole[name]) for name in whole}
            if left.keys() <= whole.keys() and all(half.values()):
                return
        sizes = {name: len(data) for name, data in left.items()}
        raise Failure(f"{label}: exit code {end.code} leaves {sizes}, before {sorted(before)}")


def hear_signals() -> None:
    """Undo what a shell does to jobs in the background, and nohup: they ignore signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def hears_signals(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM, which Python by itself has not."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _listen(process: "subprocess.Popen[bytes]", told: int, seconds: float) -> bytes:
    """What the command's interpreter tells, or nothing if it ends, or does not get as far."""
    limit = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < limit:
        if select.select([told], [], [], 0.01)[0]:
            return os.read(told, 8)
    return b""


def _feed(process: "subprocess.Popen[bytes]", path: Path) -> None:
    """Put half of a file into standard input while all goes on."""
    assert process.stdin is not None
    # A number of its own: that of `stdin` may soon be another process's.
    pipe, half = os.dup(process.stdin.fileno()), path.read_bytes()[: path.stat().st_size // 2]

    def write(left: bytes = half) -> None:
        with contextlib.suppress(OSError):  # the command has ended
            while left:
                left = left[os.write(pipe, left) :]
        os.close(pipe)

    threading.Thread(target=write, daemon=True).start()


def main() -> None:
    """Send signals; print what failed, and how it went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bound", type=float, default=1.0, help="seconds to end in")
    parser.add_argument("--only", default="", help="commands whose name this pattern matches")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="of moments")
    options = parser.parse_args()
    ends: Counter[str] = Counter()
    times: list[float] = []
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        stress = Stress(Path(folder), options.seed, only=options.only)
        stress.kinds = options.kinds
        for _ in range(options.count):
            try:
                label, end = stress.once()
                if end.code and end.seconds > options.bound and SAVED not in end.complaint:
                    raise Failure(f"{label}: took {end.seconds:.2f} s: {end.complaint[-300:]!r}")
            except Failure as failure:
                failed += 1
                print(failure, flush=True)
                continue
            kind = label.split("(")[1].split()[0]
            if end.early and end.code:
                ends["to Python, before our first line"] += 1
            elif SAVED in end.complaint:
                ends["143 after a training's state was saved"] += 1
            else:
                ends[f"{end.code} ({kind})"] += 1
                times += [end.seconds] if end.code else []
    print(f"{options.count} signals, {failed} failed")
    for what, count in sorted(ends.items()):
        print(f"  {count:5} {what}")
    if times:
        times.sort()
        half, most, last = (times[int(part * (len(times) - 1))] for part in (0.5, 0.99, 1))
        print(f"half ended within {half:.3f} s, 99 % within {most:.3f} s, all within {last:.3f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
