"""The package against the vectors of the specification, in every runtime that is there.

All requirements ELSA-R-… and ELSA-D-… that a vector cites are tried here once more.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

import elsa_format

HERE = Path(__file__).parent
RUN = HERE / "run_vectors.mjs"
BUGS: list[list[str]] = json.loads((HERE / "planted.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All vectors, with those that are made and not committed."""
    folder = tmp_path_factory.mktemp("vectors")
    make = ROOT / "spec" / "make_vectors.py"
    subprocess.run([sys.executable, make, "--extended", folder], check=True)
    return folder


def test_all_vectors(run_node: Callable[..., str], vectors: Path) -> None:
    (result,) = json.loads(run_node(RUN, vectors))
    assert result["failures"] == []
    assert result["kernels"] == "wasm"
    manifest = json.loads((vectors / "manifest.json").read_text("utf-8"))
    assert result["count"] == 4 * len(manifest["vectors"])


def test_all_vectors_without_webassembly(run_node: Callable[..., str], vectors: Path) -> None:
    (result,) = json.loads(run_node(RUN, vectors, "plain", "first"))
    assert result["failures"] == []
    assert result["kernels"] == "plain"


def found(program: str) -> str:
    """A runtime on the PATH or where make runtimes puts it; nobody needs them."""
    installed = ROOT / ".cache" / "runtimes" / "node_modules" / ".bin"
    path = shutil.which(program) or shutil.which(program, path=str(installed))
    if path is None:
        pytest.skip(f"{program} is not installed (make runtimes)")
    return path


@pytest.mark.parametrize(
    "command",
    [["node"], ["deno", "run", "-A", "--node-modules-dir=manual"], ["bun"]],
    ids=["node", "deno", "bun"],
)
def test_first_example_of_the_readme(command: list[str], node: str, tmp_path: Path) -> None:
    """As it is written, with a file where one works."""
    readme = (ROOT / "js" / "README.md").read_text("utf-8")
    example = readme.split("```js\n")[1].split("```")[0]
    (tmp_path / "package.json").write_text('{"dependencies": {"elsa-format": "*"}}')
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "elsa-format").symlink_to(ROOT / "js")
    kernel = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    elsa_format.pack({"conv1/kernel": kernel}, tmp_path / "net.safetensors", sparsities="50%")
    (tmp_path / "shown.mjs").write_text(
        example + "console.log(dtype, shape.join(), data.join())", "utf-8"
    )
    done = subprocess.run(
        [node if command[0] == "node" else found(command[0]), *command[1:], "shown.mjs"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("F32 2,4 0,0,0,0,4.99999")


@pytest.mark.parametrize("command", [["deno", "run", "-A"], ["bun"]], ids=["deno", "bun"])
def test_all_vectors_elsewhere(command: list[str], vectors: Path) -> None:
    command = [found(command[0]), *command[1:], str(RUN), str(vectors)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["failures"] == []
    assert result["kernels"] == "wasm"


KINDS = {"elsa": "elsa,index", "level": "level,level_index", "delivery": "delivery,delivery_index"}
BY_MODULE = {
    "csr": "level",
    "layouts": "level",
    "streams": "delivery",
    "payload": "delivery",
    "inflate": "delivery",
}


def kind_of(file: str, _code: str, _bug: str, kind: str = "") -> str:
    """The kind of vectors that a bug, or its module, has to do with."""
    if kind:
        return kind
    module = file.removesuffix(".js")
    found = [kind for kind in KINDS if module.startswith(kind)]
    return found[0] if found else BY_MODULE.get(module, "elsa")


@pytest.mark.parametrize("kind", KINDS)
def test_planted_bugs_are_found(
    run_node: Callable[..., str], vectors: Path, tmp_path: Path, kind: str
) -> None:
    """A vector for every rule: each of these bugs, alone, makes at least one of them fail."""
    bugs = [bug for bug in BUGS if kind_of(*bug) == kind]
    folders = []
    for number, (file, code, bug, *_) in enumerate(bugs):
        folder = tmp_path / f"{number}"
        shutil.copytree(ROOT / "js" / "src", folder)
        text = (folder / file).read_text("utf-8")
        assert text.count(code) == 1, f"{file} has {code!r} {text.count(code)} times"
        (folder / file).write_text(text.replace(code, bug), "utf-8")
        folders.append(folder)
    options = ["first", "plain", f"kinds={KINDS[kind]}"]
    results: list[dict[str, Any]] = json.loads(run_node(RUN, vectors, *options, *folders))
    missed = [bugs[i] for i, result in enumerate(results) if not result["failures"]]
    assert not missed, missed
