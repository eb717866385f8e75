"""The operators' C code by itself, compared with the definition on random layers."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "converters/elsa_converters/sparse/native"
COMPILER = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)


@pytest.fixture(scope="module")
def check(tmp_path_factory):
    """The program that checks them."""
    if COMPILER is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler")
        pytest.skip("no C compiler")
    program = tmp_path_factory.mktemp("native") / "check"
    sources = [str(path) for path in NATIVE.glob("*.c")]
    command = [COMPILER, "-std=gnu11", "-O2", "-ffp-contract=fast", f"-I{NATIVE}", *sources]
    command += [str(Path(__file__).with_name("check.c")), "-o", str(program), "-lm", "-lpthread"]
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
