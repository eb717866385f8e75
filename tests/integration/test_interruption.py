"""Ctrl-C, SIGTERM and readers that go away: a quick end, nothing left, no traceback."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_server import serving
from internals import DTYPES, import_line, lay_out, serialize

import elsa_format as elsa
from elsa_format import TensorInfo
from fuzz import signals
from fuzz.signals import Running

BIN = Path(sys.executable).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file much larger than a pipe's buffer."""
    path = tmp_path_factory.mktemp("net") / "net.safetensors"
    weights = np.random.default_rng(3).standard_normal((512, 1024)).astype(np.float32)
    elsa.pack({f"layer{i:03}": weights[i : i + 2] for i in range(400)}, path, sparsities=[90, 50])
    return path


@pytest.fixture(scope="module")
def hole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 16 GiB that takes no room, and long to read."""
    path = tmp_path_factory.mktemp("hole") / "dense.safetensors"
    info = TensorInfo("w", DTYPES["F32"], (1 << 12, 1 << 20))
    with open(path, "wb") as file:
        file.write(serialize(lay_out([info]), {}))
        file.truncate(file.tell() + info.nbytes)
    return path


def running(folder: Path, *words: object, **options: Any) -> Running:
    """A command under way, with its output in a folder begun but not finished."""
    command = Running([BIN / "elsa", *words], **options)
    command.begin_file(folder)
    return command


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("options", [[], ["--layout", "csr"], ["--keep-levels"]])
def test_extract(
    net: Path, tmp_path: Path, number: signal.Signals, code: int, options: list[str]
) -> None:
    out = tmp_path / "level.safetensors"
    with running(tmp_path, "extract", "-", "-l", 1, "-o", out, *options, half=net) as command:
        assert command.stop(number) == (code, "")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("sparsities", ["90,50", "1:8,1:4"])
def test_pack(
    hole: Path, tmp_path: Path, number: signal.Signals, code: int, sparsities: str
) -> None:
    out = tmp_path / "net.safetensors"
    with running(tmp_path, "pack", hole, "--sparsities", sparsities, "-o", out) as command:
        time.sleep(0.2)
        assert command.stop(number) == (code, "")
    assert os.listdir(tmp_path) == []


def test_where_temporary_files_have_names(net: Path, tmp_path: Path) -> None:
    """As on file systems without unnamed files."""
    words = ["extract", "-", "-l", "1", "-o", tmp_path / "level.safetensors"]
    for number in (signal.SIGINT, signal.SIGTERM):
        with Running([sys.executable, "-c", signals.NAMED, *words], half=net) as command:
            command.begin_file(tmp_path)
            assert len(os.listdir(tmp_path)) == 1
            assert command.stop(number) == (128 + number, "")
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_fetch_of_side_files(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """The weights have their name already, and hold nothing."""
    (tmp_path / "net").mkdir()
    elsa.pack({"w": np.ones((20, 20))}, tmp_path / "net" / "model.safetensors", sparsities=[50])
    (tmp_path / "net" / "config.json").write_text("{}")
    elsa.ship(tmp_path / "net", tmp_path / "shipped")
    out, go_on = tmp_path / "out", threading.Event()
    with serving() as server:
        for path in (tmp_path / "shipped").iterdir():
            server.serve(path.read_bytes(), f"/{path.name}")
        server.files["/config.json"].faults = [lambda request: go_on.wait(signals.HANGS)]
        with running(out, "fetch", f"{server.url}/", "--level", 1, "-o", out) as command:
            assert os.listdir(out) == ["model.ship.safetensors"]
            assert command.stop(number) == (code, "")
        go_on.set()
    assert not out.exists()


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (100, ["extract", "-l", "1", "-o", "-"]),
        (100, ["extract", "-l", "2", "-o", "-", "--layout", "bitmask"]),
        (100, ["extract", "-l", "1", "-o", "-", "--keep-levels"]),
        (0, ["inspect", "--json"]),
        (0, ["inspect"]),
        (0, ["verify"]),
    ],
)
def test_closed_pipe(net: Path, size: int, words: list[str]) -> None:
    process = subprocess.Popen(
        [str(BIN / "elsa"), words[0], str(net), *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert len(process.stdout.read(size)) == size
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(signals.HANGS) == 141


# --- Any moment ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> signals.Stress:
    """A short run of `python -m fuzz.signals`."""
    only = r"^(pack|pack shards|extract|extract pipe|verify|verify shards)$"
    return signals.Stress(tmp_path_factory.mktemp("stress"), seed=0, only=only)


@pytest.mark.parametrize("kind", signals.KINDS)
def test_signals_at_any_moment(kind: str, stress: signals.Stress) -> None:
    stress.kinds = (kind,)
    for _ in range(10):
        stress.once()


def started(script: str) -> Running:
    """A script under way that hears signals as commands do, and has said so."""
    begin = f"import os, signal, time; {import_line('_start')}; _start.end_on_signals()"
    command = [sys.executable, "-c", f"{begin}\n{script}"]
    process = Running(command, stdout=subprocess.PIPE)
    assert process.line() == b"ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_where_python_does_not_come_to_its_turn(number: signal.Signals) -> None:
    """C code that takes minutes, as compilers and slow name servers may."""
    script = "print('ready', flush=True)\nimport hashlib\n"
    with started(script + "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)") as process:
        time.sleep(0.2)
        assert process.stop(number) == (128 + number, "")


def test_a_program_in_between_can_take_a_signal_over() -> None:
    """As the trainer does, which saves its state first."""
    script = (
        "heard = []\n"
        "before = signal.signal(signal.SIGTERM, lambda *_: heard.append('mine'))\n"
        "print('ready', flush=True)\n"
        "while not heard: time.sleep(0.01)\n"
        "print(*heard, flush=True)\n"
        "signal.signal(signal.SIGTERM, before)\n"
        "print('back', flush=True)\n"
        "time.sleep(30)"
    )
    with started(script) as process:
        process.process.send_signal(signal.SIGTERM)
        assert [process.line() for _ in range(2)] == [b"mine\n", b"back\n"]
        assert process.stop(signal.SIGTERM)[0] == 143


def test_a_fork_has_its_signals_back() -> None:
    script = (
        "begun, begin = os.pipe()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os.write(begin, b'.')\n"
        "    time.sleep(30)\n"
        "os.read(begun, 1)\n"
        "os.kill(child, signal.SIGTERM)\n"
        "print('ready', flush=True)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)"
    )
    with started(script) as process:
        assert [process.line() for _ in range(2)] == [b"-15\n", b""]
        assert process.end()[0] == 0


def test_without_threads_python_hears_signals_itself() -> None:
    script = f"""
import _thread, signal
def refuse(*arguments): raise RuntimeError("can't start new thread")
_thread.start_new_thread = refuse
{import_line("_start")}
_start.end_on_signals()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_signals_that_are_ignored_stay_so(hole: Path, tmp_path: Path) -> None:
    """As with nohup, and of jobs in the background of a script."""
    words = ["pack", hole, "--sparsities", "90", "-o", tmp_path / "out.safetensors"]

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    with running(tmp_path, *words, before=ignore) as command:
        command.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            command.process.wait(1)
        assert command.stop(signal.SIGTERM) == (143, "")


def test_tests_run_where_signals_are_ignored() -> None:
    """As with `nohup make test &`: what they start hears signals all the same."""

    def ignore() -> None:
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    words = ["-q", "-p", "no:cacheprovider", "-n0", __file__, "-k", "does_not_come_to_its_turn"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=Path(__file__).parents[2],
        preexec_fn=ignore,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


# --- As a library --------------------------------------------------------------------------------

LIBRARY = """
import signal, threading
numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
before = [signal.getsignal(number) for number in numbers]
import elsa_format
elsa_format.open
assert [signal.getsignal(number) for number in numbers] == before
assert signal.set_wakeup_fd(-1) == -1
assert threading.active_count() == 1
"""


def test_a_library_leaves_signals_alone() -> None:
    subprocess.run([sys.executable, "-c", LIBRARY], check=True)


NOTEBOOK = (
    import_line("_file")
    + """
import os, random, signal, sys, time
import elsa_format as elsa

_file.PARALLEL_FROM = 0
net, out = sys.argv[1:]

def work():
    elsa.verify(net)
    elsa.extract(net, out, level=1, layout="csr", force=True)
    with elsa.open(net) as file:
        file.load(2)

work()
begin = time.monotonic()
work()
usual = time.monotonic() - begin
rng, interrupted = random.Random(0), 0
while interrupted < 20:  # however long work takes now
    try:
        try:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, usual))
            work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    assert set(os.listdir(os.path.dirname(out))) <= {os.path.basename(out)}
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm(30)  # a hang is a failure
work()
"""
)


def test_ctrl_c_in_a_notebook(net: Path, tmp_path: Path) -> None:
    """What was interrupted can be done again, and Python ends."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK, net, tmp_path / "out"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
