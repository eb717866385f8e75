"""Which kernels run is said, a missing C module once, and a big-endian machine is refused."""

import os
import platform
import subprocess
import sys
import sysconfig
from importlib.metadata import distribution
from pathlib import Path

import pytest
from internals import _kernels, import_line
from kernel_modules import HAVE_COMPILER, load_build

import elsa_format

pty = pytest.importorskip("pty", reason="no terminals to test with")

WITHOUT_C = "import sys; sys.modules['elsa_format._native'] = None; "
INSPECT = f"{import_line('_start')}; _start.inspect()"
PACK = f"{import_line('_start')}; _start.pack()"
BIG_ENDIAN = "import runpy, sys; sys.byteorder = 'big'; "
REFUSED = "elsa_format needs a little-endian machine; this one is big-endian"
COMMANDS = distribution("elsa-format").entry_points.select(group="console_scripts")


def run(script: str, *arguments: object, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output, and what a terminal shows as standard error."""
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "NO_COLOR": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=False,
    )
    os.write(theirs, b"\n")  # so that there is something to read
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    return done.returncode, done.stdout, shown.strip()


@pytest.fixture
def remembering(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing has been said yet, and numpy was not asked for."""
    return {"XDG_CACHE_HOME": str(tmp_path / "cache"), "ELSA_PURE_PYTHON": ""}


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo")
def test_the_kernels_are_those_for_the_processor() -> None:
    flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    avx2 = platform.machine() == "x86_64" and {"avx2", "bmi1", "popcnt"} <= set(flags)
    native = "C, AVX2" if avx2 else "plain C"
    assert elsa_format.kernels() == (native if _kernels.NATIVE else "numpy")


@pytest.mark.skipif(not HAVE_COMPILER, reason="no C compiler")
def test_a_build_without_avx2_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "_native.abi3.so"
    sources = Path(__file__).parents[2].glob("elsa_format/native/*.c")
    include = f"-I{sysconfig.get_path('include')}"
    options = ["-std=c11", "-shared", "-fPIC", "-DELSA_PLAIN", "-DPy_LIMITED_API=0x030b0000"]
    subprocess.run(["cc", *options, include, *sources, "-o", module], check=True)
    monkeypatch.setattr(_kernels, "ISA", load_build(str(module)).ISA)
    assert elsa_format.kernels() == "plain C"


@pytest.mark.parametrize("without", ["", WITHOUT_C])
def test_the_version_names_the_kernels(without: str) -> None:
    script = f"{without}{import_line('main')}; main(prog_name='elsa')"
    kernels = "numpy" if without else elsa_format.kernels()
    version = f"elsa {elsa_format.__version__} (kernels: {kernels})\n"
    assert run(script, "--version") == (0, version, "")


def test_a_missing_c_module_is_mentioned_once(packed: Path, remembering: dict[str, str]) -> None:
    asked_for = run(WITHOUT_C + INSPECT, packed, **{**remembering, "ELSA_PURE_PYTHON": "1"})
    first = run(WITHOUT_C + INSPECT, packed, **remembering)
    second = run(WITHOUT_C + INSPECT, packed, **remembering)
    assert [shown.split(":")[0] for _, _, shown in (asked_for, first, second)] == ["", "note", ""]
    assert len(first[2].splitlines()) == 1
    assert asked_for[:2] == first[:2] == second[:2]
    assert first[0] == 0


def test_nothing_is_mentioned_to_programs(packed: Path, remembering: dict[str, str]) -> None:
    command = [sys.executable, "-c", WITHOUT_C + INSPECT, packed]
    done = subprocess.run(command, env={**os.environ, **remembering}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert not Path(remembering["XDG_CACHE_HOME"]).exists()


def test_nothing_is_mentioned_by_quiet_commands_or_with_the_c_module(
    packed: Path, tmp_path: Path, remembering: dict[str, str]
) -> None:
    elsa_format.extract(packed, tmp_path / "level.safetensors", level=1)
    options = ["--sparsities", "99", "-q", "-o", tmp_path / "out.safetensors"]
    pack = WITHOUT_C + PACK
    assert run(pack, tmp_path / "level.safetensors", *options, **remembering) == (0, "", "")
    if sys.modules.get("elsa_format._native"):
        assert run(INSPECT, packed, **remembering)[::2] == (0, "")
    assert not Path(remembering["XDG_CACHE_HOME"]).exists()


@pytest.mark.parametrize("home", [{"XDG_CACHE_HOME": "/dev/null"}, {"HOME": "/dev/null"}])
def test_a_home_that_cannot_remember_hurts_nobody(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    environment = {"XDG_CACHE_HOME": "relative", "ELSA_PURE_PYTHON": "", **home}
    code, out, shown = run(WITHOUT_C + INSPECT, packed, **environment)
    assert (code, shown) == (0, "")
    assert out
    assert list(tmp_path.iterdir()) == [packed]


def test_big_endian_machines_are_refused_at_import() -> None:
    script = f"""{BIG_ENDIAN}
try:
    import elsa_format
except ImportError as error:
    print(error)
print("numpy" in sys.modules)
1 / 0
"""
    code, out, shown = run(script)
    assert (code, out) == (1, f"{REFUSED}\nFalse\n")
    assert shown.startswith("Traceback")  # other errors are shown as ever
    assert shown.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("command", [entry.name for entry in COMMANDS])
def test_big_endian_machines_are_refused_by_commands(command: str) -> None:
    path = Path(sys.executable).parent / command
    script = f"{BIG_ENDIAN}runpy.run_path({str(path)!r}, run_name='__main__')"
    assert run(script, "--help") == (1, "", f"error: {REFUSED}")
