"""Files of a run's folder: written whole or not at all, and doubted when read."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elsa_train._errors import InvalidRun


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name, and the file written under it its own at the end.

    >>> with replacing(Path("table.md")) as temporary:
    ...     _ = temporary.write_text("| level |")
    >>> temporary.exists(), Path("table.md").read_text()
    (False, '| level |')
    """
    temporary = path.with_name(f".new-{path.name}")  # the suffix may choose the format
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON document, None if there is none."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise cut(path, error) from None


def cut(path: Path, problem: object) -> InvalidRun:
    """Say that a file is not what a run has written."""
    return InvalidRun(f"{path}: cut, or not of a run ({problem}); --force starts over")


def drop_cut_line(path: Path) -> None:
    """Cut off what a killed run has left of its last line."""
    if path.exists():
        whole = path.read_bytes().rfind(b"\n") + 1
        if whole < path.stat().st_size:
            os.truncate(path, whole)
