"""Numbers, strings and the order of keys as a Writer has to write them."""

import struct
from typing import Any

from spec import plain_elsa as plain
from spec.cases.collection import ids

NUMBERS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 0.93, -0.0015, 0.1, 1 / 3, 100.0, 123456.789, 1e15 + 0.5),
    *(0.0001, 0.00001, 0.0000123, 0.000001, 9.999999e-7, 1e-7, 1.5e-7, -2.5e-10, 5e-324),
    *(2.0**53 - 1, 2.0**53, -(2.0**53), 2.0**53 + 2, 1e16, 123456789e8, 1e20, 1e21, 1.5e300),
    *(2.2250738585072014e-308, 1.7976931348623157e308, 4.35, 0.3, 2.0**-1074 * 3, 2.0**70),
)
STRINGS = (
    "",
    "95%",
    '"\\/',
    "\b\f\n\r\t",
    "".join(map(chr, range(0x20))),
    "\x7f\x80\xa0\u2028\u2029\ufeff\uffff",
    "é e\u0301 層 🦙",
)
KEYS = ("b", "", "\uff5e", "a", "🦙", "10", "9", "B", "é", "__proto__", "z", "\x00", "aa", "~")


def written_cases() -> dict[str, Any]:
    """Values with their texts."""
    return {
        "description": "Written JSON (elsa-1.0.md §3.5): doubles by their bits in hex, strings by "
        "their code points, keys in the order in which they are written.",
        "requirements": ids("30 85 86"),
        "numbers": [[struct.pack(">d", x).hex(), plain.write_number(x)] for x in NUMBERS],
        "strings": [[list(map(ord, text)), plain.write_string(text)] for text in STRINGS],
        "keys": sorted(KEYS, key=str.encode),
    }
