"""Run what a page of the documentation shows: every command and Python block, in order.

`console` blocks hold `$ command` lines and their output, compared as doctest does (`...` stands for
anything). `python` blocks run in one namespace, as doctests where they have prompts. Nothing else
runs: `text`, and `py` for fragments. Lines that begin with "Install:" say what the blocks below
them need; `python pages.py PAGE N` runs the blocks that the first N of them are for, and imports
nothing but what these brought.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PART = re.compile(
    r"^```(?P<kind>\w+)\n(?P<code>.*?)^```$|^Install: `(?P<install>pip install [^`]+)`",
    re.MULTILINE | re.DOTALL,
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    kind: str
    code: str
    line: int
    installs: tuple[str, ...]
    """The commands that come before it on the page."""


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found, installs = [], ()
    for part in PART.finditer(text):
        if part["install"]:
            installs = (*installs, part["install"])
        else:
            line = text[: part.start()].count("\n") + 2
            found.append(Block(part["kind"], part["code"], line, installs))
    return found


def run(page: Path, found: list[Block]) -> None:
    """Run these blocks of a page, here."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in found:
        where = f"{page.name}:{block.line}"
        if block.kind == "console":
            run_console(block.code, where)
        elif block.kind == "python" and ">>> " in block.code:
            run_doctest(block.code, namespace, where)
        elif block.kind == "python":
            exec(compile(block.code, where, "exec"), namespace)


def run_console(code: str, where: str) -> None:
    path = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        lines = part.split("\n")
        command = lines.pop(0)
        while command.endswith("\\"):
            command = command[:-1] + lines.pop(0)
        expected = "\n".join(lines).strip() + "\n"
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            env={**os.environ, "PATH": path, "COLUMNS": "100"},
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


if __name__ == "__main__":
    shown, steps = Path(sys.argv[1]), int(sys.argv[2])
    run(shown, [block for block in blocks(shown) if len(block.installs) <= steps])
