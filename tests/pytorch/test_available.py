"""Where tests of PyTorch are left out, say so."""

from importlib.util import find_spec

import pytest
from conftest import NEEDED


@pytest.mark.parametrize("package", NEEDED.values())
def test_what_the_tests_need_is_installed(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; make test-torch installs it and runs its tests")
