"""Run what the documentation shows: every command and every Python block, in order, in one folder.

`console` blocks hold `$ command` lines and their output, compared as doctest does (`...` stands for
anything). `python` blocks run in one namespace, as doctests where they have prompts. Nothing else
runs: `text`, and `py` for fragments.
"""

import doctest
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import elsa_format

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(page: Path) -> list[tuple[str, str, int]]:
    text = page.read_text("utf-8")
    return [(m[1], m[2], text[: m.start()].count("\n") + 2) for m in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    bin_folder = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", bin_folder + os.pathsep + os.environ["PATH"])
    monkeypatch.setenv("COLUMNS", "100")
    namespace: dict[str, object] = {"__name__": "__main__"}
    for kind, code, line in blocks(page):
        where = f"{page.name}:{line}"
        if kind == "console":
            run_console(code, where)
        elif kind == "python" and ">>> " in code:
            run_doctest(code, namespace, where)
        elif kind == "python":
            exec(compile(code, where, "exec"), namespace)


def run_console(code: str, where: str) -> None:
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        command = lines.pop(0)
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0)
        expected = "\n".join(lines).strip() + "\n"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        found = done.stdout.strip() + "\n"
        checker = doctest.OutputChecker()
        assert checker.check_output(expected, found, FLAGS), f"{where}: $ {command}\n{found}"
        if "error:" not in expected:
            assert done.returncode == 0, f"{where}: $ {command}\n{found}"


def run_doctest(code: str, namespace: dict[str, object], where: str) -> None:
    test = doctest.DocTestParser().get_doctest(code, namespace, where, where, 0)
    output: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=output.append, clear_globs=False)
    assert not runner.failures, "".join(output)
    namespace.update(test.globs)


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_reader_in_another_language_agrees(rich: Path, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node.js is not installed")
    page = ROOT / "docs" / "other-languages.md"
    (code,) = [code for kind, code, _ in blocks(page) if kind == "javascript"]
    (tmp_path / "read_elsa.js").write_text(code)
    with elsa_format.open(rich) as file:
        for level in (1, 2, 3):
            done = subprocess.run(
                [node, tmp_path / "read_elsa.js", rich, str(level)],
                capture_output=True,
                text=True,
                check=True,
            )
            expected = [
                f"{name} {array.nbytes} {hashlib.sha256(array.tobytes()).hexdigest()}"
                for name, array in sorted(file.load(level).items())
            ]
            assert done.stdout.splitlines() == expected
