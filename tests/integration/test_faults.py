"""What goes wrong around us: full disks, lost rights, dying machines, files that change."""

import contextlib
import io
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import same_bits
from click.testing import CliRunner
from internals import main
from safetensors.numpy import load_file, save_file

import elsa_format as elsa

BIN = Path(sys.executable).parent
ROOT = os.geteuid() == 0
linux = pytest.mark.skipif(sys.platform != "linux", reason="uses what only Linux has")


def run(*words: object) -> tuple[int, str]:
    """A command's exit code and its one line of complaint."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    if done.exit_code:
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("error: ")
        return done.exit_code, lines[0].removeprefix("error: ")
    return 0, ""


@pytest.fixture
def dense(network: dict[str, np.ndarray], tmp_path: Path) -> Path:
    """A checkpoint to pack."""
    path = tmp_path / "dense.safetensors"
    save_file(network, path)
    return path


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of 8 MiB: many blocks."""
    weights = np.random.default_rng(5).standard_normal((1024, 2048)).astype(np.float32)
    path = tmp_path / "large.safetensors"
    elsa.pack({"w": weights, "b": weights[:, 0]}, path, sparsities=[90, 50])
    return path


Command = Callable[[Path, Path], tuple[object, ...]]
COMMANDS: dict[str, Command] = {
    "extract": lambda large, out: ("extract", large, "--level", 1, "-o", out),
    "bitmask": lambda large, out: ("extract", large, "-l", 1, "--layout", "bitmask", "-o", out),
    "keep": lambda large, out: ("extract", large, "--level", 1, "--keep-levels", "-o", out),
    "pack": lambda large, out: ("pack", _plain(large), "--sparsities", "90,50", "-o", out),
}
each_command = pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)


def _plain(large: Path) -> Path:
    path = large.with_name("plain.safetensors")
    if not path.exists():
        elsa.extract(large, path, level="dense")
    return path


# --- The output cannot be written ----------------------------------------------------------------


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system with room for 1 MiB."""
    folder = Path(tempfile.mkdtemp())
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    able = ROOT and shutil.which("mount")
    if not able or subprocess.run(mount, capture_output=True, check=False).returncode:
        folder.rmdir()
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()


@each_command
def test_disk_full(command: Command, large: Path, small_disk: Path) -> None:
    out = small_disk / "out.safetensors"
    out.write_text("old")
    assert run(*command(large, out), "--force") == (1, f"{out}: No space left on device")
    assert out.read_text() == "old"
    assert os.listdir(small_disk) == ["out.safetensors"]


@contextlib.contextmanager
def no_larger_files_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@linux
@each_command
def test_file_size_limit(command: Command, large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "out.safetensors"
    out.parent.mkdir()
    words = command(large, out)
    with no_larger_files_than(1 << 19):
        assert run(*words) == (1, f"{out}: File too large")
    assert os.listdir(out.parent) == []


@linux
def test_device_without_room(packed: Path) -> None:
    code, message = run("extract", packed, "--level", 1, "-o", "/dev/full")
    assert (code, "No space left on device" in message) == (1, True)


@linux
@pytest.mark.parametrize("words", [["inspect"], ["inspect", "--json"], ["verify"]])
def test_standard_output_without_room(packed: Path, words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [str(BIN / "elsa"), *words, str(packed)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr.decode() == "error: <stdout>: No space left on device\n"


def test_standard_output_closed(packed: Path) -> None:
    script = f'exec "{BIN}/elsa" verify "{packed}" >&-'
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    script = f'exec "{BIN}/elsa" extract "{packed}" -l 1 -o - >&-'
    done = subprocess.run(["sh", "-c", script], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (1, b"error: <stdout>: Bad file descriptor\n")


def test_output_in_a_missing_directory(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "missing" / "out.safetensors"
    assert run("extract", packed, "--level", 1, "-o", out) == (
        1,
        f"{out}: No such file or directory",
    )


def test_output_is_a_directory(packed: Path, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    expected = (1, f"{tmp_path / 'folder'}: Is a directory")
    for force in ([], ["--force"]):
        assert run("extract", packed, "-l", 1, "-o", tmp_path / "folder", *force) == expected
        assert run("pack", dense, "--sparsities", 50, "-o", tmp_path / "folder", *force) == expected


def test_output_to_the_null_device(packed: Path, dense: Path) -> None:
    before = os.stat("/dev/null")
    assert run("extract", packed, "-l", 1, "-o", "/dev/null") == (0, "")
    assert run("extract", packed, "-l", 1, "--layout", "csr", "-o", "/dev/null") == (0, "")
    assert run("pack", dense, "--sparsities", 50, "-o", "/dev/null", "--force") == (0, "")
    assert os.stat("/dev/null").st_rdev == before.st_rdev


@contextlib.contextmanager
def unprivileged() -> Iterator[Path]:
    """A directory anyone can enter, and the rights of nobody in particular."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    try:
        if ROOT:
            os.seteuid(65534)
        yield folder
    finally:
        if ROOT:
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)


def test_read_only_directory(packed: Path) -> None:
    content = packed.read_bytes()
    with unprivileged() as folder:
        if not ROOT:
            folder.chmod(0o555)
        out = folder / "out.safetensors"
        with pytest.raises(PermissionError, match=r"out\.safetensors"):
            elsa.extract(io.BytesIO(content), out, level=1)


def test_input_that_may_not_be_read(packed: Path) -> None:
    content = packed.read_bytes()
    with unprivileged() as folder:
        if ROOT:
            os.seteuid(0)
        path = folder / "secret.safetensors"
        path.write_bytes(content)
        path.chmod(0o000)
        if ROOT:
            os.seteuid(65534)
        expected = (1, f"{path}: Permission denied")
        assert run("extract", path, "-l", 1, "-o", "/dev/null") == expected
        assert run("inspect", path) == expected
        assert run("verify", path) == expected
        assert run("pack", path, "--sparsities", 50, "-o", "/dev/null") == expected


@pytest.mark.parametrize("words", [("inspect",), ("verify",), ("extract", "-l", 1, "-o", "x")])
def test_input_that_is_not_there(words: tuple[object, ...], tmp_path: Path) -> None:
    path = tmp_path / "none.safetensors"
    assert run(words[0], path, *words[1:]) == (1, f"{path}: No such file or directory")
    empty = f"{tmp_path}: is a directory, and holds no .safetensors file"
    assert run(words[0], tmp_path, *words[1:]) == (1, empty)


# --- The input cannot be read --------------------------------------------------------------------


class FailingDisk(io.BytesIO):
    """A stream whose reads fail from some byte on."""

    def __init__(self, content: bytes, good: int) -> None:
        super().__init__(content)
        self.good = good

    def _fail_late(self) -> None:
        if self.tell() >= self.good:
            raise OSError(5, "Input/output error", "disk")

    def read(self, size: Any = -1, /) -> bytes:
        self._fail_late()
        return super().read(size)

    def readinto(self, buffer: Any, /) -> int:
        self._fail_late()
        return super().readinto(buffer)


@pytest.mark.parametrize("good", [0, 8, 500, 1 << 20, 5 << 20])
@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_read_error(large: Path, tmp_path: Path, good: int, layout: Any) -> None:
    out = tmp_path / "out" / "level.safetensors"
    out.parent.mkdir()
    content = large.read_bytes()
    with pytest.raises(OSError, match="Input/output error"):
        elsa.extract(FailingDisk(content, good), out, level=1, layout=layout)
    with pytest.raises(OSError, match="Input/output error"):
        elsa.verify(FailingDisk(content, good))
    assert os.listdir(out.parent) == []


@linux
def test_read_error_of_a_file() -> None:
    # Reading address 0 of one's own memory is an input/output error, without a broken disk.
    assert run("extract", "/proc/self/mem", "-l", 1, "-o", "/dev/null") == (
        1,
        "/proc/self/mem: Input/output error",
    )
    assert run("pack", "/proc/self/mem", "--sparsities", 50, "-o", "/dev/null")[0] in (1, 3)


class Meddler:
    """Changes the input while it is being read."""

    def __init__(self, path: Path) -> None:
        self.path, self.done = path, False

    def __call__(self, done: int, total: int) -> None:
        if not self.done and done > total // 2:
            self.done = True
            with open(self.path, "r+b") as file:
                file.seek(self.path.stat().st_size - 1)
                file.write(b"\x55")
            os.utime(self.path, ns=(1, 1))  # however coarse the file system's clock is


@pytest.mark.parametrize("options", [{}, {"layout": "csr"}, {"keep_levels": True}])
def test_input_changed_while_it_was_read(large: Path, tmp_path: Path, options: Any) -> None:
    out = tmp_path / "out" / "level.safetensors"
    out.parent.mkdir()
    meddler = Meddler(large)
    with pytest.raises(elsa.InputChanged, match="large"):
        elsa.extract(large, out, level=1, verify=False, progress=meddler, **options)
    assert meddler.done
    assert os.listdir(out.parent) == []


def test_input_changed_while_it_was_packed(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "packed.safetensors"
    out.parent.mkdir()
    plain = _plain(large)
    with pytest.raises(elsa.InputChanged, match="plain"):
        elsa.pack(plain, out, sparsities=[90, 50], progress=Meddler(plain))
    assert os.listdir(out.parent) == []


# --- Outputs that are there already --------------------------------------------------------------


def test_output_onto_the_input(large: Path, dense: Path, tmp_path: Path) -> None:
    before = large.read_bytes()
    code, message = run("extract", large, "--level", 1, "-o", large)
    assert (code, message) == (1, f"{large}: exists already; --force replaces it")
    assert large.read_bytes() == before
    elsa.extract(large, tmp_path / "level.safetensors", level=1)
    assert run("extract", large, "--level", 1, "-o", large, "--force") == (0, "")
    assert large.read_bytes() == (tmp_path / "level.safetensors").read_bytes()
    elsa.pack(dense, tmp_path / "net.safetensors", sparsities=[50])
    assert run("pack", dense, "--sparsities", 50, "-o", dense)[0] == 1
    assert run("pack", dense, "--sparsities", 50, "-o", dense, "--force") == (0, "")
    assert dense.read_bytes() == (tmp_path / "net.safetensors").read_bytes()


def test_output_onto_the_input_by_another_name(rich: Path, tmp_path: Path) -> None:
    link, hard = tmp_path / "link.safetensors", tmp_path / "hard.safetensors"
    link.symlink_to(rich.name)
    os.link(rich, hard)
    before = rich.read_bytes()
    with elsa.open(rich) as file:
        level = file.load(1)
    assert run("extract", rich, "--level", 1, "-o", link)[0] == 1
    assert run("extract", rich, "--level", 1, "-o", link, "--force") == (0, "")
    assert link.is_symlink()
    assert same_bits(load_file(rich), level)
    assert hard.read_bytes() == before  # another name of the old file keeps the old content


def test_link_to_nothing_yet(rich: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.safetensors"
    link.symlink_to("later.safetensors")
    assert run("extract", rich, "--level", 1, "-o", link) == (0, "")
    assert link.is_symlink()
    assert (tmp_path / "later.safetensors").is_file()


@pytest.mark.parametrize("force", [False, True])
def test_two_writers_to_one_output(large: Path, tmp_path: Path, force: bool) -> None:
    out = tmp_path / "out" / "level.safetensors"
    out.parent.mkdir()
    start, results = threading.Barrier(2), []

    def write(level: int) -> None:
        start.wait()
        try:
            elsa.extract(large, out, level=level, force=force)
            results.append(level)
        except elsa.OutputExists:
            results.append(0)

    writers = [threading.Thread(target=write, args=(level,)) for level in (1, 2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert os.listdir(out.parent) == [out.name]
    assert sorted(results) == [1, 2] if force else 0 in results and any(results)
    with elsa.open(large) as file:
        whole = [same_bits(load_file(out), file.load(level)) for level in (1, 2)]
    assert any(whole)
    assert force or whole[max(results) - 1]


def _with_template(large: Path) -> Path:
    """The same network as a graph that points into an ELSA file."""
    onnx = pytest.importorskip("onnx")
    weights = load_file(_plain(large))
    floats, helper = onnx.TensorProto.FLOAT, onnx.helper
    ends = [
        helper.make_tensor_value_info(n, floats, ["n", k]) for n, k in (("x", 1024), ("y", 2048))
    ]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Neg", ["z"], ["y"])]
    initial = [onnx.numpy_helper.from_array(weights["w"], "w")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], initial)
    imports = [helper.make_opsetid("", 21)]
    onnx.save(
        helper.make_model(graph, opset_imports=imports, ir_version=10), large.parent / "m.onnx"
    )
    net = large.parent / "net.safetensors"
    elsa.pack(large.parent / "m.onnx", net, sparsities=[90, 50], template=net.with_suffix(".onnx"))
    return net


# --- The machine dies ----------------------------------------------------------------------------

KILLED = """
import os, random, signal, sys, time
import elsa_format as elsa
from elsa_report import write_report

operation, source, out, seed, rounds = sys.argv[1:]
rng = random.Random(int(seed))
if operation == "export":
    from elsa_converters import onnx

def work():
    if operation == "pack":
        elsa.pack(source, out, sparsities=[90, 50], force=True)
    elif operation == "export":
        onnx.export(source, source.replace("safetensors", "onnx"), out, level=1, force=True)
    elif operation == "html":
        write_report(source, out, full=True, force=True)
    else:
        elsa.extract(source, out, level=1, layout=operation, force=True)

def child():
    pid = os.fork()
    if pid:
        return pid
    work()
    os._exit(0)

begin = time.monotonic()
os.waitpid(child(), 0)
longest = 1.2 * (time.monotonic() - begin)
for _ in range(int(rounds)):
    with open(out, "w") as file:
        file.write("old")
    pid = child()
    time.sleep(rng.random() * longest)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    folder, name = os.path.split(out)
    left = set(os.listdir(folder)) - {name}
    if left and os.path.getsize(out) == 3:
        # Only between link and rename, when it replaces a file, may the new one have two names.
        (extra,) = left
        assert extra.startswith(".elsa-") and extra.endswith(".tmp"), left
        os.replace(os.path.join(folder, extra), out)  # complete, as is checked below
        left = set()
    assert not left, left
    if os.path.getsize(out) == 3:
        print("old")
    elif operation == "pack":
        print("new", elsa.verify(out).levels)
    elif operation == "export":
        print("new", len(onnx.OnnxCheckpoint(out).tensors))
    elif operation == "html":
        print("new", 2 if open(out).read().endswith("</html>\\n") else 0)
    else:
        print("new", len(elsa.load_level(out)))
"""


@linux
@pytest.mark.parametrize("operation", ["pack", "dense", "bitmask", "export", "html"])
def test_kill_at_any_moment(operation: str, large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out" / "out.safetensors"
    out.parent.mkdir()
    source = {"pack": _plain, "export": _with_template}.get(operation, Path)(large)
    seed = random.Random(operation).randrange(1000)
    words = [operation, str(source), str(out), str(seed), "20"]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) <= {"old", f"new {1 if operation == 'export' else 2}"}
    assert "old" in done.stdout
