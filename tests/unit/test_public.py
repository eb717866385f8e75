"""What the package shows to its users."""

import subprocess
import sys
from pathlib import Path

from internals import _errors, import_line

import elsa_format


def test_everything_exported_exists_and_is_sorted() -> None:
    assert elsa_format.__all__ == sorted(elsa_format.__all__)
    for name in elsa_format.__all__:
        assert hasattr(elsa_format, name)


def test_every_error_is_exported_and_knows_its_exit_code() -> None:
    for name, value in vars(_errors).items():
        if isinstance(value, type) and issubclass(value, elsa_format.ElsaError):
            assert name in elsa_format.__all__
            assert value.exit_code in (1, 2, 3)
            assert value.__doc__
            assert name in _errors.__doc__


def test_importing_the_format_imports_nothing_heavy() -> None:
    script = (
        f"import sys; {import_line('_pack_command')}; "
        "heavy = {'jax', 'flax', 'onnx', 'onnxruntime', 'torch', 'scipy', 'safetensors'}; "
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == ""


def test_the_format_holds_no_page() -> None:
    kinds = {path.suffix for path in Path(elsa_format.__file__).parent.rglob("*") if path.is_file()}
    assert not kinds & {".css", ".html", ".js"}
