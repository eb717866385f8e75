"""Checksums of every length that XXH3 treats in its own way, and of headers that state one."""

from typing import Any

from spec import plain_elsa as plain
from spec.cases.collection import ids

# The first and last length of every branch of XXH3-64, and around the stripes and blocks of long
# inputs: 64 bytes a stripe, 1024 a block.
LENGTHS = (
    *(0, 1, 2, 3, 4, 5, 8, 9, 12, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 144, 160, 239, 240),
    *(241, 256, 257, 512, 1023, 1024, 1025, 1088, 1089, 2048, 2049),
)


def numbered(length: int) -> bytes:
    """Bytes that are all around different."""
    return bytes((i * i + 7 * i + length) % 251 for i in range(length))


def checksum_cases() -> dict[str, Any]:
    """Lengths with their checksums, and headers with what each has to state."""
    digits = "0123456789abcdef"
    headers = []
    for text in (
        f'{{"__metadata__":{{"elsa":"xxh3:{digits}"}}}}',
        f"{{{digits} and {digits}}}  ",
        f"{{{digits.upper()}}}",
        "{00000000000000000}",
    ):
        headers.append([text, digits])
    # Digits that overlap themselves: found from the left, the rest stays.
    for text, stated in (("0" * 17, "0" * 16), ("a1" * 9, "a1" * 8), ("7" * 47, "7" * 16)):
        headers.append([f"{{{text}}}", stated])
    headers.append(["{1fffffffffffffff1fffffffffffffff1}", "1fffffffffffffff"])
    headers.append(["{cafecafecafecafe" + "cafe" * 5 + "}", "cafe" * 4])
    return {
        "description": "Checksums (elsa-1.0.md §8). Byte i of a case of n bytes is "
        "(i * i + 7 * i + n) mod 251. A header is given as text, with the digits it states "
        "and its checksum once those are zeros.",
        "requirements": ids("63 89"),
        "columns": ["bytes", "checksum"],
        "cases": [[n, plain.checksum(numbered(n))] for n in LENGTHS],
        "header_columns": ["header", "digits", "checksum"],
        "headers": [
            [text, stated, plain.header_checksum(text.encode(), f"xxh3:{stated}")]
            for text, stated in headers
        ],
    }
