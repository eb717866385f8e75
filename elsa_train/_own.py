"""Code of a user's own, named `module:name` on the command line or from Python, never in a file."""

import os
import re
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from elsa_train._errors import BadRecipe

NAMED = re.compile(r"[\w.]+:[\w.]+")


def is_own(name: str) -> bool:
    """Tell whether a name is that of code.

    >>> is_own("mymodels:Net"), is_own("digits")
    (True, False)
    """
    return NAMED.fullmatch(name) is not None


def find_own(kind: str, name: str, expected: str) -> Any:
    """Import what a name says: where Python looks for modules, then in the current directory.

    Who chooses the name chooses the code that runs: it is never taken from a file.
    """
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # A console script's path does not have it. Last: nothing installed may be shadowed.
        sys.path.append(here)
    try:
        found = import_module(module)
    except ImportError as error:
        raise BadRecipe(f"{kind} {name!r}: {error}") from None
    except Exception as error:
        raise BadRecipe(f"{kind} {name!r}: importing it: {blaming(error)}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            where = getattr(found, "__file__", None) or getattr(found, "__name__", module)
            raise BadRecipe(f"{kind} {name!r}: {where} has no {part!r}")
        found = getattr(found, part)
    if not callable(found):
        raise BadRecipe(f"{kind} {name!r}: expected a class or function, {expected}")
    return found


def blaming(error: Exception) -> str:
    """Say in one line what an error in somebody's code is, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
