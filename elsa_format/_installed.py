"""How a package was installed, and so what to type for an extra of it; where it does not run."""

import json
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

PACKAGE = "elsa-format"


def install_command(extra: str, package: str = PACKAGE) -> str:
    """The command that installs what an extra needs, from where this copy came from (PEP 610).

    A clone, a wheel or a repository need not be in any index, so it is named. Without an extra, the
    package itself is installed once more: a part of it is missing.
    """
    again = "" if extra else "--force-reinstall "
    return f"pip install {again}{_requirement(f'[{extra}]' if extra else '', package)}"


def _requirement(extras: str, package: str) -> str:
    origin = _origin(package)
    url, wanted = str(origin.get("url", "")), f"{package}{extras}"
    if url.startswith("file:"):
        from urllib.parse import urlsplit  # both take long to import
        from urllib.request import url2pathname

        path = url2pathname(urlsplit(url).path)
        if not os.path.exists(path):  # moved, or removed
            return _quoted(wanted)
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return editable + _quoted(f"{path}{extras}")
    if url:
        found = origin.get("vcs_info", {})
        kind, commit = found.get("vcs", ""), found.get("commit_id", "")
        return _quoted(f"{wanted} @ {kind and f'{kind}+'}{url}{commit and f'@{commit}'}")
    return _quoted(wanted)


def _quoted(text: str) -> str:
    import shlex  # only here, as it takes long to import

    return f'"{text}"' if os.name == "nt" else shlex.quote(text)


def _origin(package: str) -> dict[str, Any]:
    """Where a package came from, as pip noted it; nothing if that was an index."""
    from importlib.metadata import PackageNotFoundError, distribution  # takes long to import

    try:
        text = distribution(package).read_text("direct_url.json")
    except PackageNotFoundError:  # run from a clone that nobody installed
        clone = Path(__file__).resolve().parents[1]
        here = package == PACKAGE and (clone / "pyproject.toml").is_file()
        return {"url": clone.as_uri()} if here else {}
    try:
        origin = json.loads(text or "{}")
    except ValueError:
        return {}
    return origin if isinstance(origin, dict) else {}


def refuse_big_endian() -> NoReturn:
    """Fail as an import does; where nobody catches it, as in commands, with one line."""
    refusal = ImportError("elsa_format needs a little-endian machine; this one is big-endian")
    show_others = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is refusal:
            print(f"error: {error}", file=sys.stderr)
        else:
            show_others(kind, error, trace)

    sys.excepthook = show
    raise refusal
