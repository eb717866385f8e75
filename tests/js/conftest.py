"""Node.js, and a process of it that answers for the package."""

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OLDEST = 20


def missing(reason: str) -> None:
    """Skip where a tool is missing, but not in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def node() -> str:
    """The program, where it is new enough."""
    program = shutil.which("node")
    if program is None:
        missing("needs Node.js")
    assert program is not None
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.lstrip("v").split(".")[0]) < OLDEST:
        missing(f"needs Node.js {OLDEST} or newer")
    return program


@pytest.fixture(scope="session")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small networks, and their directories for the web."""
    from web_networks import build

    folder = tmp_path_factory.mktemp("networks")
    build(folder)
    return folder


@pytest.fixture(scope="session")
def expected(networks: Path) -> dict[str, list[float]]:
    """What Python makes of them."""
    from web_networks import reference

    return reference(networks)


class Judge:
    """The package in a process of its own: questions and answers, one line each."""

    def __init__(self, command: list[str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, text=True, encoding="utf-8", **pipes)  # type: ignore[call-overload]

    def answer(self, ask: str, **question: Any) -> dict[str, Any]:
        """What it says: {"value": …}, or {"error": code, "message": …}."""
        coded = {
            key: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for key, value in question.items()
        }
        self._process.stdin.write(json.dumps({"ask": ask, **coded}, default=str) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "crash" not in answer, answer["crash"]
        return answer

    def value(self, ask: str, **question: Any) -> Any:
        """The value of an answer, which is no error."""
        answer = self.answer(ask, **question)
        assert "error" not in answer, answer
        return answer.get("value")

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="session", params=["wasm", "plain"])
def judge(node: str, request: pytest.FixtureRequest) -> Iterator[Judge]:
    """Each with its kernels in WebAssembly, and in plain JavaScript."""
    opened = Judge([node, str(Path(__file__).with_name("judge.mjs")), request.param])
    assert opened.value("kernels") == request.param
    yield opened
    opened.close()


@pytest.fixture
def run_node(node: str) -> Callable[..., str]:
    """Run a script to its end, and give what it printed."""

    def run(*arguments: object, **options: Any) -> str:
        command = [node, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
