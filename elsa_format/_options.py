"""Arguments as callers give them, checked once: what is not an allowed value is an error.

A command's options are checked by click; from Python nothing else would notice a misspelled word.
"""

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, TypeVar

T = TypeVar("T", bound=str)


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


def whole(keyword: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """The value as an int: Python's or numpy's, in a range.

    >>> whole("jobs", 0, low=1)
    Traceback (most recent call last):
    ValueError: jobs 0, expected a whole number from 1
    """
    expected = "a whole number"
    expected += "" if low is None else f" from {low}"
    expected += "" if high is None else f" to {high}"
    number = as_whole(value)
    if number is None:
        raise TypeError(f"{keyword} {value!r}, expected {expected}")
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{keyword} {number}, expected {expected}")
    return number


def as_whole(value: Any) -> int | None:
    """The value as an int, None if it is no whole number: True and numpy's True are none.

    >>> as_whole(3), as_whole(3.0), as_whole(True)
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
