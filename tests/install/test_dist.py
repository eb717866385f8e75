"""What a release is: the files in dist/, installed where there is nothing of the project.

Takes minutes and an index of packages: `make test-dist`, which builds them.
"""

import os
import shutil
import subprocess
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PROBES = {
    "onnx": "import onnxruntime; from elsa_converters import onnx; onnx.session; "
    "onnxruntime.SessionOptions().register_custom_ops_library(onnx.sparse_ops_library())",
    "flax-onnx": "import elsa_converters.flax_onnx",
    "train": "import elsa_train; elsa_train.multi_level",
    "records": "from array_record.python.array_record_module import ArrayRecordReader",
    "remote": "import fsspec; fsspec.open('memory://net', 'wb').open().close()",
    "torch": "import elsa_converters.torch, elsa_train.torch",
    "transformers": "import elsa_converters.transformers",
    "plot": "import matplotlib.pyplot",
}
"""What an extra is for; `dev` is for us."""


@pytest.fixture(scope="session")
def wheel() -> Path:
    (found,) = (ROOT / "dist").glob("*.whl")
    return found


class Machine:
    """An empty environment that has no tools but Python, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.commands = folder, folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)

    def run(self, *command: str | Path) -> str:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(
            [self.commands / command[0], *command[1:]],
            cwd=self.folder,
            env={**kept, "PATH": str(self.commands)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"$ {command}\n{done.stdout}"
        return done.stdout


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    yield Machine(tmp_path)
    shutil.rmtree(tmp_path / "venv")  # gigabytes


def test_wheel_is_for_every_python_and_most_of_linux(wheel: Path) -> None:
    assert "-cp311-abi3-manylinux" in wheel.name


def test_wheel_holds_what_runs_and_nothing_else(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    ours = [name for name in names if ".dist-info/" not in name]
    assert {name.partition("/")[0] for name in ours} == {
        "elsa_converters",
        "elsa_format",
        "elsa_report",
        "elsa_train",
    }
    kinds = {name.rpartition(".")[2] for name in ours}
    assert kinds == {"css", "html", "js", "py", "pyi", "so", "toml", "typed"}


def test_source_archive_holds_what_is_committed() -> None:
    (archive,) = (ROOT / "dist").glob("*.tar.gz")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, check=True)
    wanted = set(listed.stdout.decode().splitlines()) | {"PKG-INFO"}
    with tarfile.open(archive) as file:
        assert {name.partition("/")[2] for name in file.getnames()} == wanted


def test_same_bytes_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "clone"], check=True)
    own = f"{ROOT}/.venv"
    make = ["make", "dist", f"VENV={own}", f"--old-file={own}/ready"]  # which stays what it is
    subprocess.run(make, cwd=tmp_path / "clone", check=True, umask=0o077)
    for path in (ROOT / "dist").iterdir():
        assert (tmp_path / "clone" / "dist" / path.name).read_bytes() == path.read_bytes(), path


def test_base(wheel: Path, machine: Machine) -> None:
    """The commands, and the vectors of the specification, without a compiler or the sources."""
    machine.run("pip", "install", wheel)
    assert "kernels: C" in machine.run("elsa", "--version")
    for command in PROJECT["scripts"]:
        assert "Usage: elsa" in machine.run(command, "--help")
    example = ROOT / "spec" / "vectors" / "valid" / "example.safetensors"
    machine.run("elsa-verify", example)
    machine.run("elsa-inspect", example, "--html", "page.html")
    machine.run("elsa-extract", example, "--level", "1", "-o", "level.safetensors")
    machine.run("elsa-ship", example, "-o", "net.ship.safetensors")
    machine.run("elsa-extract", "net.ship.safetensors", "--restore", "-o", "net.safetensors")
    assert (machine.folder / "net.safetensors").read_bytes() == example.read_bytes()

    for name in ("spec", "tests"):
        shutil.copytree(ROOT / name, machine.folder / name)
    shutil.copy(ROOT / "pyproject.toml", machine.folder)
    machine.run("pip", "install", "pytest", "hypothesis", "safetensors", "jsonschema")
    said = machine.run("python", "-m", "pytest", "-q", "tests/conformance/test_vectors.py",
                       "tests/conformance/test_delivery_files.py")  # fmt: skip
    assert " passed" in said


@pytest.mark.parametrize("extra", PROBES)
def test_extra_alone(extra: str, wheel: Path, machine: Machine) -> None:
    if extra in ("torch", "transformers"):
        machine.run("pip", "install", "torch==2.13.0")  # any other brings CUDA
    machine.run("pip", "install", f"{wheel}[{extra}]")
    machine.run("python", "-c", PROBES[extra])
    machine.run("elsa", "--help")


def test_every_extra_is_tried() -> None:
    assert PROBES.keys() | {"dev"} == PROJECT["optional-dependencies"].keys()
