"""Two implementations that share no code agree on thousands of damaged files.

The second one is spec/plain_elsa.py. Both have to name the same error (ELSA-R-079), except where
the specification gives errors no order.
"""

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from vector_files import ROOT, Vector, each

import elsa_format

sys.path.insert(0, str(ROOT))

from spec import plain_elsa

MUTATIONS = 40
UNORDERED = (
    {"InvalidJson", "DuplicateKey"},
    {"InvalidHeader", "UnknownDtype"},
    {"CounterOutOfRange", "NonFinite"},
)
VALUES = (
    *("0", "1", "2", "3", "-1", "-0", "1.5", "2.0", "1e3", "1e400", "NaN"),
    *("4294967296", "9007199254740992", "9223372036854775808"),
    *("true", "false", "null", "[]", "{}", "[1]", "[[]]", '{"a":1}'),
    *('""', '"a"', '"F32"', '"I32"', '"\\ud800"', '"__elsa__.1.x"'),
)
SCALAR = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|\[\]|\{\}')
PAIR = re.compile(r'"[^"\\]*":(?:\d+|"[^"\\]*"|\[[\d,]*\])')


def change_text(text: str, random_: random.Random) -> str:
    """JSON with one thing wrong, most likely."""
    scalars, pairs = list(SCALAR.finditer(text)), list(PAIR.finditer(text))
    scalar, pair = random_.choice(scalars), random_.choice(pairs or scalars)
    at = random_.randrange(len(text))
    number = random_.choice(list(re.finditer(r"\d+", text)) or [scalar])
    nudged = str(max(0, int(number[0]) + random_.choice([-4, -1, 1, 8]))) if pairs else "0"
    return random_.choice(
        [
            text[: scalar.start()] + random_.choice(VALUES) + text[scalar.end() :],
            text[: pair.end()] + "," + pair[0] + text[pair.end() :],
            text[: pair.start()] + text[pair.end() :].removeprefix(","),
            text[: number.start()] + nudged + text[number.end() :],
            text[:at] + text[at + 1 :],
            text[:at] + random_.choice('{}[],:"0-.e \\') + text[at:],
        ]
    )


def damage(raw: bytes, key: str, random_: random.Random) -> bytes:
    """A file with damage to its header, its document, one bit, or its end."""
    length = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + length].decode().rstrip(" "), raw[8 + length :]
    way = random_.randrange(10)
    if way == 0:
        return raw[: random_.randrange(len(raw))]
    if way == 1:
        at = random_.randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << random_.randrange(8)]) + raw[at + 1 :]
    if way < 5:
        header = change_text(header, random_)
    else:
        parsed = json.loads(header)
        text = parsed["__metadata__"][key]
        # With its checksum in place, most damage would show as just that.
        text = re.sub(r'"header":"xxh3:[0-9a-f]{16}",', "", text)
        parsed["__metadata__"][key] = change_text(text, random_)
        header = json.dumps(parsed, ensure_ascii=False)
    encoded = header.encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def verdict(action: Callable[[], object]) -> str | None:
    """The name of the error, by either implementation."""
    try:
        action()
    except plain_elsa.Bad as bad:
        return bad.error
    except elsa_format.FormatError as error:
        return type(error).__name__
    return None


def damage_index(raw: bytes, random_: random.Random) -> bytes:
    """An index with damage to its JSON, or to one byte."""
    if random_.randrange(8) == 0:
        at = random_.randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << random_.randrange(8)]) + raw[at + 1 :]
    return change_text(raw.decode(), random_).encode()


def compare_index(
    vector: Vector,
    folder: Path,
    ours: Callable[[Path], object],
    second: Callable[[Path], object],
) -> None:
    """Damage an index beside its shards, and compare verdicts."""
    for path in vector.path.parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    path, random_ = folder / vector.path.name, random.Random(vector["sha256"])
    for _ in range(4 * MUTATIONS):
        raw = damage_index(vector.path.read_bytes(), random_)
        path.write_bytes(raw)
        found, expected = verdict(lambda: ours(path)), verdict(lambda: second(path))
        if found != expected and not any({found, expected} <= errors for errors in UNORDERED):
            pytest.fail(f"elsa_format: {found}, plain_elsa: {expected}, on {raw!r}")


def compare(vector: Vector, key: str, path: Path, ours: Callable[[Path], object]) -> None:
    """Damage a vector in many ways and compare verdicts."""
    second = plain_elsa.validate if key == "elsa" else plain_elsa.load_level
    random_ = random.Random(vector["sha256"])
    for _ in range(MUTATIONS):
        raw = damage(vector.path.read_bytes(), key, random_)
        path.write_bytes(raw)
        found, expected = verdict(lambda: ours(path)), verdict(lambda raw=raw: second(raw))  # type: ignore[misc]
        if found != expected and not any({found, expected} <= errors for errors in UNORDERED):
            pytest.fail(f"elsa_format: {found}, plain_elsa: {expected}, on {raw!r}")


@each("valid", "elsa")
def test_damaged_files(vector: Vector, tmp_path: Path) -> None:
    compare(vector, "elsa", tmp_path / "file", elsa_format.verify)


@each("valid", "level")
def test_damaged_level_files(vector: Vector, tmp_path: Path) -> None:
    compare(vector, "elsa_level", tmp_path / "file", elsa_format.load_level)


@each("valid", "index")
def test_damaged_indexes(vector: Vector, tmp_path: Path) -> None:
    compare_index(vector, tmp_path, elsa_format.verify, plain_elsa.validate_index)


@each("valid", "level_index")
def test_damaged_level_indexes(vector: Vector, tmp_path: Path) -> None:
    compare_index(vector, tmp_path, elsa_format.load_level, plain_elsa.load_level_index)
