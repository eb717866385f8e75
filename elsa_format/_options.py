"""Arguments as callers give them, checked once: what is not an allowed value is an error.

A command's options are checked by click; from Python nothing else would notice a misspelled word.
"""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, TypeVar
from warnings import warn

from elsa_format._errors import TooLarge

T = TypeVar("T", bound=str)


def renamed(old: str, new: str) -> None:
    """Warn of a name that is gone after the next release."""
    warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)


def one_of(keyword: str, value: Any, allowed: Sequence[T]) -> T:
    """The value, which is one of a few words.

    >>> one_of("layout", "coo", ("dense", "bitmask", "csr"))
    Traceback (most recent call last):
    ValueError: layout 'coo', expected one of 'dense', 'bitmask', 'csr'
    """
    if value not in allowed:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{keyword} {value!r}, expected one of {', '.join(map(repr, allowed))}")
    return allowed[allowed.index(value)]


def check_int(keyword: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """The value as an int: Python's or numpy's, in a range.

    >>> check_int("jobs", 0, low=1)
    Traceback (most recent call last):
    ValueError: jobs 0, expected a whole number from 1
    """
    expected = "a whole number"
    expected += "" if low is None else f" from {low}"
    expected += "" if high is None else f" to {high}"
    number = as_int(value)
    if number is None:
        raise TypeError(f"{keyword} {value!r}, expected {expected}")
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{keyword} {number}, expected {expected}")
    return number


def as_int(value: Any) -> int | None:
    """The value as an int, None if it is no whole number: True and numpy's True are none.

    >>> as_int(3), as_int(3.0), as_int(True)
    (3, None, None)
    """
    if isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b":
        return None  # numpy 1 takes its own for numbers
    try:
        return index(value)
    except TypeError:
        return None


def strings(keyword: str, value: str | Iterable[str]) -> list[str]:
    """Several strings; a lone one is one of them, not its letters.

    >>> strings("include", "w*"), strings("include", ("a", "b"))
    (['w*'], ['a', 'b'])
    """
    items = [value] if isinstance(value, str) else list(value)
    for item in items:
        if not isinstance(item, str):
            raise TypeError(f"{keyword} holds {item!r}, expected strings")
    return items


class Limit:
    """The `max_bytes` of a call: what all headers together, and all tensors, may take at most.

    Whatever reads a header counts it here first, and so refuses it before there is memory for it.

    >>> limit = Limit(1000)
    >>> limit.header(600, "a.safetensors")
    >>> limit.header(600, "b.safetensors")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    elsa_format._errors.TooLarge: b.safetensors: headers of 1200 bytes, more than the 1000 ...
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._most = None if max_bytes is None else check_int("max_bytes", max_bytes, low=0)
        self._headers = 0

    def header(self, size: int, where: str) -> None:
        """Count a header, or an index, that is about to be read."""
        self._headers += size
        kind = "a header" if self._headers == size else "headers"
        self._refuse(f"{where}: {kind}", self._headers)

    def tensors(self, size: int, where: str) -> None:
        """Refuse tensors that are too large as dense arrays."""
        self._refuse(f"{where}: tensors", size)

    def _refuse(self, what: str, size: int) -> None:
        if self._most is not None and size > self._most:
            raise TooLarge.of(f"{what} of {size} bytes", self._most)
