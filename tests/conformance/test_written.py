"""What two Writers have to agree on, case by case: JSON and checksums (spec §3.5, §8)."""

import json
import math
import random
import struct
import sys

import pytest
import xxhash
from internals import _json, _profile
from vector_files import COMMITTED, ROOT

sys.path.insert(0, str(ROOT))

from spec import plain_elsa

WRITTEN = json.loads((COMMITTED / "written.json").read_text(encoding="utf-8"))
CHECKSUMS = json.loads((COMMITTED / "checksums.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("bits", "text"), WRITTEN["numbers"])
def test_numbers(bits: str, text: str) -> None:
    """ELSA-R-086; and what is written is read as the same number (ELSA-R-083)."""
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert _json.dump(value) == plain_elsa.write_json(value) == text
    assert _json.parse_document(f'{{"x":{text}}}', "x") == {"x": value}
    assert plain_elsa.parse_document(f'{{"x":{text}}}') == {"x": value}


def test_any_number() -> None:
    """Two ways to arrange the digits of all kinds of doubles (ELSA-R-086)."""
    random_ = random.Random(86)
    for _ in range(20_000):
        (value,) = struct.unpack(">d", random_.randbytes(8))
        for x in (value, random_.uniform(-1, 1) * 10.0 ** random_.randrange(-12, 24)):
            if math.isfinite(x):
                assert _json.dump(x) == plain_elsa.write_number(x)
                assert float(_json.dump(x)) == x


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        _json.dump({"x": [value]})


@pytest.mark.parametrize(("points", "text"), WRITTEN["strings"])
def test_strings(points: list[int], text: str) -> None:
    """ELSA-R-085."""
    value = "".join(map(chr, points))
    assert _json.dump(value) == plain_elsa.write_json(value) == text
    assert _json.parse_document(f'{{"x":{text}}}', "x") == {"x": value}


def test_keys() -> None:
    """The order of UTF-8 bytes is the one of code points, by which Python sorts (ELSA-R-030)."""
    keys = WRITTEN["keys"]
    assert keys == sorted(keys) == sorted(keys, key=str.encode)
    text = plain_elsa.write_json(dict.fromkeys(reversed(keys), 1))
    assert text == _json.dump(dict.fromkeys(keys, 1.0))


@pytest.mark.parametrize(("size", "checksum"), CHECKSUMS["cases"])
def test_checksums(size: int, checksum: str) -> None:
    """ELSA-R-089."""
    content = bytes((i * i + 7 * i + size) % 251 for i in range(size))
    assert plain_elsa.checksum(content) == checksum
    assert f"xxh3:{xxhash.xxh3_64_hexdigest(content)}" == checksum


@pytest.mark.parametrize(("text", "digits", "checksum"), CHECKSUMS["headers"])
def test_header_checksums(text: str, digits: str, checksum: str) -> None:
    """ELSA-R-063."""
    assert _profile.header_checksum(text.encode(), f"xxh3:{digits}") == checksum
    assert plain_elsa.header_checksum(text.encode(), f"xxh3:{digits}") == checksum
