"""What a new user does: install into an empty environment, as written, and follow the page.

Takes minutes and an index of packages, so `make test` leaves it to `make test-install`.
"""

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks

pytestmark = pytest.mark.install

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "demo.py")
NOT_SOURCE = (".git", ".venv*", ".cache", "build", "dist", "demo-out", "runs", "*.so")
BASH = shutil.which("bash") or "bash"
Shell = Callable[..., str]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """Runs commands in a fresh clone, or in a folder, in an environment that is empty at first."""
    clone, commands = tmp_path / "clone", tmp_path / "venv" / "bin"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    venv.create(tmp_path / "venv", with_pip=True)
    for name in ("PYTHONPATH", "ELSA_PURE_PYTHON", "CFLAGS", "CC"):
        monkeypatch.delenv(name, raising=False)

    def run(command: str, folder: Path = clone, tools: bool = True, **environment: str) -> str:
        path = os.pathsep.join([str(commands), os.environ["PATH"]] if tools else [str(commands)])
        done = subprocess.run(
            [BASH, "-o", "pipefail", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout

    yield run
    shutil.rmtree(tmp_path / "venv")  # gigabytes


def has_c(shell: Shell) -> bool:
    return "numpy" not in shell("elsa --version")


def test_with_a_compiler(shell: Shell) -> None:
    shell("pip install .")
    assert has_c(shell)


def test_with_a_compiler_that_warns(shell: Shell) -> None:
    assert "warning:" in shell("pip install -v .", CFLAGS="-Wall -Wdeclaration-after-statement")
    assert has_c(shell)


def test_with_a_compiler_that_fails(shell: Shell) -> None:
    shell("pip install .", CC="false")
    assert not has_c(shell)


def test_without_a_compiler(shell: Shell) -> None:
    shell("pip install .", tools=False)
    assert not has_c(shell)


def test_without_cmake_or_a_wheel_of_it(shell: Shell) -> None:
    shell("pip install scikit-build-core click ml_dtypes numpy xxhash")
    elsewhere = {"_PYTHON_HOST_PLATFORM": "linux-sparc64"}
    shell("pip install --no-build-isolation --no-deps .", tools=False, **elsewhere)
    assert not has_c(shell)


def steps(page: Path) -> tuple[str, ...]:
    """What a page says to install for the blocks that run; the package, if it says nothing."""
    run = [block.installs for block in blocks(page) if block.kind in ("console", "python")]
    return (run[-1] or ("pip install .",)) if run else ()


@pytest.mark.parametrize("page", [page for page in PAGES if steps(page)], ids=lambda p: p.name)
def test_a_page_needs_what_it_says(page: Path, shell: Shell, tmp_path: Path) -> None:
    for number, install in enumerate(steps(page), 1):
        folder = tmp_path / f"step{number}"
        folder.mkdir()
        shell(install)
        shell(f"python {ROOT}/tests/pages.py {page} {number}", folder)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_needs_what_it_says(example: Path, shell: Shell) -> None:
    (install,) = re.findall(r"^ *(pip install .+)$", example.read_text("utf-8"), re.MULTILINE)
    shell(install)
    shell(f"python examples/{example.name}")


def test_training_needs_its_extra_and_plots_theirs(shell: Shell, tmp_path: Path) -> None:
    short = "--epochs 1 --sparsify-epochs 1 --densify-epochs 1"
    shell("pip install '.[train]'")
    said = shell(f"elsa-train digits {short} --out {tmp_path}/run")
    (advice,) = re.findall(r"no plot: .*; run: (pip install .+)", said)
    shell(advice)  # the package is there, so this need not find it in an index
    shell(f"elsa-train digits {short} --out {tmp_path}/run")
    assert (tmp_path / "run" / "accuracy.png").stat().st_size > 0
