"""What a big-endian machine gets instead of the package."""

import sys
from types import TracebackType
from typing import NoReturn


def refuse() -> NoReturn:
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
