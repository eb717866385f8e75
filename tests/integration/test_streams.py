"""Standard streams that are closed or full, names that are no text, outputs that are no files."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from internals import import_line
from safetensors.numpy import save_file

import elsa_format as elsa

BIN = Path(sys.executable).parent
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses what only Linux has")
STRANGE = b"\xff\xfe".decode(errors="surrogateescape")
LOCALES = {
    "utf-8": {"LC_ALL": "C.UTF-8"},
    "coerced": {"LC_ALL": "C"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


@pytest.fixture
def here(
    tmp_path: Path, network: dict[str, np.ndarray], rich: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A folder with inputs, also under a name that is not UTF-8, and an empty one for outputs."""
    monkeypatch.chdir(tmp_path)
    save_file(network, "dense.safetensors")
    for name, source in (("dense", "dense.safetensors"), ("net", rich.name)):
        os.link(source, f"{name}{STRANGE}")
    os.rename(rich, "net.safetensors")
    Path("out").mkdir()
    return tmp_path / "out"


def shell(line: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **environment},
    )


PACK = "elsa-pack dense.safetensors --sparsities 90,80 -o out/o"
EXTRACT = "elsa-extract net.safetensors -l 1 -o out/o"
WORKING = [
    PACK,
    EXTRACT,
    "elsa-inspect net.safetensors --html out/o",
    "elsa-verify net.safetensors",
]
BROKEN = {"elsa-verify dense.safetensors": 3, "elsa-verify nothing": 1, "elsa-verify": 2}


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-", "2>/dev/full"])
def test_work_is_done_without_standard_streams(closed: str, here: Path) -> None:
    for line in WORKING:
        done = shell(f"{line} {closed}")
        assert (done.returncode, b"rror" in done.stderr) == (0, False), line
        if "-o" in line:
            assert elsa.load_level(here / "o") if "extract" in line else elsa.verify(here / "o")
        (here / "o").unlink(missing_ok=True)
    for line, code in BROKEN.items():
        done = shell(f"{line} {closed}")
        assert done.returncode == code, line
        assert b"Traceback" not in done.stderr
        assert done.stdout == b""


@pytest.mark.parametrize(
    "line",
    [
        "elsa-inspect net.safetensors",
        "elsa-inspect net.safetensors --json",
        "elsa-inspect net.safetensors --html -",
        "elsa-verify net.safetensors --json",
        f"{PACK} --json",
        f"{EXTRACT} --json",
        f"{PACK.removesuffix('out/o')}-",
        f"{EXTRACT.removesuffix('out/o')}-",
    ],
)
@pytest.mark.parametrize(
    ("stream", "problem"),
    [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")],
)
def test_an_answer_that_cannot_be_printed(line: str, stream: str, problem: str, here: Path) -> None:
    done = shell(f"{line} {stream}")
    assert (done.returncode, done.stderr.decode()) == (1, f"error: <stdout>: {problem}\n")


@pytest.mark.parametrize(
    "line", ["elsa-verify -", "elsa-extract - -l 1 -o out/o", "elsa-inspect -"]
)
def test_closed_standard_input(line: str, here: Path) -> None:
    done = shell(f"{line} <&-")
    assert (done.returncode, done.stderr) == (1, b"error: <stdin>: Bad file descriptor\n")
    assert os.listdir(here) == []


def test_nothing_is_printed_into_an_output(here: Path) -> None:
    """A file that is opened where standard error is closed would get its number."""
    assert shell(PACK).returncode == 0
    whole = (here / "o").read_bytes()
    script = f"import os; {import_line('_start')}; os.close(2); _start.pack()"
    words = [*PACK.split()[1:], "--force"]
    subprocess.run([sys.executable, "-c", script, *words], check=True, capture_output=True)
    assert (here / "o").read_bytes() == whole


@pytest.mark.parametrize("words", ["--help", "--version", "extract --help", "train --help"])
def test_help_that_cannot_be_printed(words: str) -> None:
    done = shell(f"elsa {words} >/dev/full")
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


@pytest.mark.parametrize("locale", LOCALES)
def test_names_that_are_not_utf_8(locale: str, here: Path) -> None:
    dense, net, out = f"dense{STRANGE}", f"net{STRANGE}", here / f"out{STRANGE}"
    runs: list[tuple[tuple[Any, ...], int]] = [
        (("pack", dense, "--sparsities", "90", "-o", out), 0),
        (("verify", out), 0),
        (("verify", out, "--json"), 0),
        (("verify", dense), 3),
        (("verify", f"nothing{STRANGE}"), 1),
        (("inspect", net), 0),
        (("inspect", net, "--json"), 0),
        (("inspect", net, "--html", f"{out}.html"), 0),
        (("inspect", net, "-o", f"{out}.txt"), 0),
        (("extract", net, "-l", "1", "-o", f"{out}.level"), 0),
        (("extract", net, "-l", "1", "-o", f"{out}.level"), 1),
        (("extract", net, "-l", STRANGE, "-o", f"{out}.none"), 2),
        (("extract", net, "--sparsity", STRANGE, "-o", f"{out}.none"), 2),
        (("pack", dense, "--sparsities", STRANGE, "-o", f"{out}.none"), 2),
        (("pack", dense, "--sparsities", "90", "--names", STRANGE, "-o", f"{out}.none"), 2),
        (("pack", dense, "--sparsities", "90", "--include", STRANGE, "-o", f"{out}.none"), 2),
        (("pack", dense, "--sparsities", "90", "--scope", STRANGE, "-o", f"{out}.none"), 2),
        (("pack", dense, "--sparsities", "90", "-o", f"{out}.index.json"), 2),
        (("pack", f"--{STRANGE}"), 2),
        ((STRANGE,), 2),
        (("train", STRANGE), 2),
    ]
    for words, code in runs if locale == "utf-8" else runs[:11]:
        done = subprocess.run(
            [BIN / "elsa", *words],
            capture_output=True,
            check=False,
            env={**os.environ, **LOCALES[locale]},
        )
        assert done.returncode == code, (words, done.stderr)
        assert b"Traceback" not in done.stderr
        if "--json" in words:
            assert STRANGE in json.loads(done.stdout)["path"]
        if code:
            lines = done.stderr.decode().splitlines()
            assert lines[-1].lower().startswith("error: ")
            assert "\\udcff\\udcfe" in lines[-1]
    left = {f"out{STRANGE}{suffix}" for suffix in ("", ".html", ".txt", ".level")}
    assert set(os.listdir(here)) == left


def test_ascii_terminals_get_ascii(here: Path) -> None:
    text = shell("elsa-inspect net.safetensors", **LOCALES["ascii"]).stdout
    assert b" 3x3x4x8 " in text
    assert text.isascii()


TO_STREAMS = [
    "elsa-pack dense.safetensors --sparsities 90,80 -q -o",
    "elsa-extract net.safetensors -l 1 -o",
    "elsa-extract net.safetensors -l 1 --layout csr -o",
    "elsa-extract net.safetensors -l 2 --keep-levels -o",
    "elsa-inspect net.safetensors -o",
    "elsa-inspect net.safetensors --html",
]


@pytest.mark.parametrize("line", TO_STREAMS)
def test_outputs_that_are_no_files(line: str, here: Path) -> None:
    expected = shell(f"{line} -").stdout
    assert expected
    assert shell(f"{line} /dev/stdout | cat").stdout == expected
    assert shell(f"{line} /dev/stdout > out/o").returncode == 0
    assert (here / "o").read_bytes() == expected
    (here / "o").write_bytes(b"before")
    assert shell(f"{line} /dev/fd/1 >> out/o").returncode == 0
    assert (here / "o").read_bytes() == b"before" + expected
    done = shell(f"{line} /dev/null")
    assert done.returncode == 0
    assert b" 0 B" not in done.stderr
    os.mkfifo(here / "pipe")
    got: list[bytes] = []

    def read() -> None:
        got.append((here / "pipe").read_bytes())
        (here / "pipe").unlink()

    reader = threading.Thread(target=read)
    reader.start()
    done = shell(f"{line} out/pipe")
    reader.join()
    assert (done.returncode, got) == (0, [expected])
    assert b" 0 B" not in done.stderr


@pytest.mark.parametrize("line", TO_STREAMS)
def test_errors_name_the_device(line: str, here: Path) -> None:
    done = shell(f"{line} /dev/full")
    assert done.returncode == 1
    assert done.stderr.decode() == "error: /dev/full: No space left on device\n"


def test_errors_name_the_folder_of_temporary_files(here: Path) -> None:
    """What a pipe cannot take in order is on disk before."""
    script = (
        f"import resource, sys; {import_line('_start')}; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); _start.pack()"
    )
    words = ["dense.safetensors", "--sparsities", "90", "-o", "-"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        check=False,
        env={**os.environ, "TMPDIR": str(here)},
    )
    assert (done.returncode, done.stderr.decode()) == (1, f"error: {here}: File too large\n")
