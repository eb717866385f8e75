"""The operators' C code by itself, compared with the definition on random layers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "converters/elsa_converters/sparse/native"
COMPILER = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
COMPILE = [COMPILER, "-std=gnu11", "-O2", "-ffp-contract=fast"]


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The C code, compiled once."""
    if COMPILER is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler")
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("native")
    sources = [str(path) for path in [*NATIVE.glob("*.c"), NATIVE / "torch" / "door.c"]]
    subprocess.run([*COMPILE, "-c", *sources], cwd=folder, check=True)
    return sorted(str(path) for path in folder.glob("*.o"))


@pytest.fixture(scope="module", params=["check", "check_door"])
def check(request, objects, tmp_path_factory):
    """The programs that check the layers, and the door by which PyTorch calls them."""
    program = tmp_path_factory.mktemp("native") / request.param
    main = str(Path(__file__).with_name(f"{request.param}.c"))
    command = [*COMPILE, f"-I{NATIVE}", main, *objects, "-o", str(program), "-lm", "-lpthread"]
    subprocess.run(command, check=True)
    return program


@pytest.mark.parametrize("isa", ["avx512", "avx2", "base"])
def test_random_layers(check, isa):
    """With each set of instructions that this processor has."""
    environment = os.environ | {"ELSA_SPARSE_ISA": isa}
    done = subprocess.run(
        [check, "400"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("400 rounds\n")
