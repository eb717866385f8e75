"""Restricted JSON (spec §3.2): what two parsers could read differently is an error.

The standard library's parser keeps the last of two equal keys, and accepts NaN, lone surrogates
and numbers of any size; the hooks here refuse them.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any, NoReturn

from elsa_format._errors import (
    DuplicateKey,
    FormatError,
    InvalidJson,
    UnsupportedFeature,
    UnsupportedVersion,
)

MAX_DEPTH = 32
MAX_SAFE_INTEGER = 2**53 - 1
MAX_OFFSET = 2**63 - 1

_SURROGATE_ESCAPE = re.compile(r"\\u[dD]")


def is_text(text: str) -> bool:
    """Whether text can be stored; names of files and arguments need not be UTF-8.

    >>> is_text("é"), is_text(b"\\xe9".decode(errors="surrogateescape"))
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_header(raw: bytes, where: str) -> dict[str, Any]:
    """The header's JSON object; its numbers are unsigned integers below 2^63."""

    def integer(digits: str) -> int:
        if digits.startswith("-") or len(digits) > 19 or (value := int(digits)) > MAX_OFFSET:
            raise InvalidJson(f"{where}: number {digits[:24]} is not an integer in 0..2^63-1")
        return value

    def real(digits: str) -> NoReturn:
        raise InvalidJson(f"{where}: number {digits[:24]} is not an integer in 0..2^63-1")

    if not raw.startswith(b"{"):
        raise InvalidJson(f"{where}: the header starts with {raw[:1]!r}, expected '{{'")
    if not raw.rstrip(b" ").endswith(b"}"):
        raise InvalidJson(f"{where}: the header does not end in '}}' and spaces")
    text = _decode(raw, f"{where}: the header")
    return _parse(text, f"{where}: header", integer, real)


def parse_document(text: str | bytes, where: str) -> dict[str, Any]:
    """A JSON object out of the metadata, or a file: the profile, an index, a manifest."""
    text = text if isinstance(text, str) else _decode(text, f"{where}:")

    def integer(digits: str) -> int:
        if len(digits) > 17 or abs(value := int(digits)) > MAX_SAFE_INTEGER:
            raise InvalidJson(f"{where}: integer {digits[:24]} exceeds 2^53-1")
        return value

    def real(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            raise InvalidJson(f"{where}: number {digits[:24]} is not finite")
        return value

    return _parse(text, where, integer, real)


def _decode(raw: bytes, what: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidJson(f"{what} is not UTF-8 at byte {error.start}") from None


def quote(text: str) -> str:
    """A string as JSON; only what has to be escaped is."""
    return encode_basestring(text)


def dump(value: Any) -> str:
    """JSON as every Writer has to write it (spec §3.5), in the given key order."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, dict):
        return "{" + ",".join([f"{quote(key)}:{dump(item)}" for key, item in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([dump(item) for item in value]) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if isinstance(value, int) else _number(value)


def _number(value: float) -> str:
    """As ECMAScript writes numbers, so that 1.0 is 1, but never with digits alone from 2^53 on."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    if abs(value) <= MAX_SAFE_INTEGER and value == int(value):
        return str(int(value))
    digits = Decimal(repr(float(value))).normalize()
    return f"{digits:f}" if 1e-6 <= abs(value) < MAX_SAFE_INTEGER else f"{digits:e}"


def _parse(
    text: str, where: str, integer: Callable[[str], int], real: Callable[[str], float]
) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            # In linear time: a hostile header may hold millions of keys.
            counts = Counter(key for key, _ in pairs)
            twice = next(key for key, count in counts.items() if count > 1)
            raise DuplicateKey(f"{where}: key {twice!r} appears twice in one object")
        return found

    def constant(name: str) -> NoReturn:
        raise InvalidJson(f"{where}: {name} is not JSON")

    try:
        value = json.loads(
            text,
            object_pairs_hook=unique,
            parse_int=integer,
            parse_float=real,
            parse_constant=constant,
        )
        if _SURROGATE_ESCAPE.search(text):
            dump(value).encode("utf-8")
    except json.JSONDecodeError as error:
        raise InvalidJson(f"{where}: {error.msg} at character {error.pos}") from None
    except UnicodeEncodeError:
        raise InvalidJson(f"{where}: a string holds half of a surrogate pair") from None
    except RecursionError:
        raise InvalidJson(f"{where}: nested deeper than {MAX_DEPTH}") from None
    if not isinstance(value, dict):
        raise InvalidJson(f"{where}: found {type(value).__name__}, expected an object")
    _check_depth(value, where)
    return value


def _check_depth(value: dict[str, Any], where: str) -> None:
    row: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        row = [
            child
            for node in row
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not row:
            return
    raise InvalidJson(f"{where}: nested deeper than {MAX_DEPTH}")


def check_version(document: Mapping[str, Any], where: str, malformed: type[FormatError]) -> None:
    """Refuse a document of another major version, or one that requires what 1.0 does not know."""
    version = document.get("version")
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", version):
        raise malformed(f"{where} version {version!r}, expected 'MAJOR.MINOR'")
    if not version.startswith("1."):  # as text: 01 is another major version
        raise UnsupportedVersion(f"{where} version {version}, expected 1.x")
    requires = document.get("requires", [])
    if not isinstance(requires, list) or not all(isinstance(item, str) for item in requires):
        raise malformed(f"{where} requires is not a list of strings")
    if requires:
        raise UnsupportedFeature(f"{where} requires {', '.join(requires)}, which 1.0 does not know")
