"""Lists of directories: texts with what they say, or with the error that they are."""

from functools import partial
from typing import Any

from spec import plain_delivery
from spec.cases.build import dump
from spec.cases.collection import error_of

WEIGHTS = "model.ship.safetensors"
DIGEST = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of "x"
ENTRY = {"size": 1, "sha256": DIGEST}
GOOD = (
    "config.json",
    ".gitattributes",
    "a/b/c.txt",
    "a/.hidden",
    "größe #1?.txt",
    "...",
    "a..b",
    "~",
    " ",
)
UNSAFE = (
    *("", ".", "..", "/x", "x/", "a//x", "./x", "../x", "a/../x", "a/..", ".git/x", "a/.b/x"),
    *("a\\x", "c:x", "\x00", "a\nb", "elsa-files.json"),
)
ENTRIES: tuple[Any, ...] = (1, [], {}, "x")


def listing(**changes: Any) -> str:
    """The text of a list that is valid but for the changes; what is None is left out."""
    document = {"files": {}, "version": "1.0", "weights": WEIGHTS} | changes
    return dump({key: value for key, value in document.items() if value is not None})


def listing_cases() -> dict[str, Any]:
    """Valid and invalid texts."""
    valid = [
        listing(),
        listing(files=dict(sorted((path, ENTRY) for path in GOOD))),
        listing(weights=f"{WEIGHTS}.index.json", files={"empty": ENTRY | {"size": 0}}),
        listing(version="1.12345678901", requires=[], more={"files": 1}),
        listing(files={"x": ENTRY | {"more": None}, WEIGHTS + "x": ENTRY | {"size": 2**53 - 1}}),
        " " + listing().replace(",", ",\n"),
    ]
    invalid = [
        ("InvalidJson", "[]"),
        ("InvalidJson", "<html>"),
        ("DuplicateKey", '{"weights":"a","weights":"b"}'),
        ("DuplicateKey", '{"files":{"x":1,"x":1},"version":"2.0","weights":"b"}'),
        *(("InvalidIndex", listing(version=version)) for version in (None, 1, "1", "x", "1.0 ")),
        *(("UnsupportedVersion", listing(version=version)) for version in ("2.0", "01.0")),
        ("UnsupportedFeature", listing(requires=["folders"], files=[])),
        ("InvalidIndex", listing(requires="folders")),
        *(("InvalidIndex", listing(weights=weights)) for weights in (None, 1, ["a"])),
        *(("InvalidIndex", listing(files=files)) for files in (None, [], ["config.json"])),
        *(("InvalidIndex", listing(files={"x": entry})) for entry in ENTRIES),
        *(
            ("InvalidIndex", listing(files={"x": ENTRY | {"size": n}}))
            for n in (-1, 1.5, "1", True)
        ),
        *(
            ("InvalidIndex", listing(files={"x": ENTRY | {"sha256": digest}}))
            for digest in (1, DIGEST[1:], DIGEST.upper(), f"sha256:{DIGEST}")
        ),
        ("InvalidIndex", listing(files={WEIGHTS: ENTRY})),
        *(("UnsafePath", listing(files={path: ENTRY})) for path in UNSAFE),
        *(("UnsafePath", listing(weights=path)) for path in (*UNSAFE, "a/model.ship.safetensors")),
    ]
    for error, text in [*((None, text) for text in valid), *invalid]:
        if error_of(partial(plain_delivery.read_listing, text)) != error:
            raise ValueError(f"{text} is not {error}")
    return {
        "description": "Lists of directories (delivery-1.0.md §9.1): texts that are valid, and "
        "others with their error.",
        "requirements": [f"ELSA-D-{number:03}" for number in (45, 46, 47, 50)],
        "valid": valid,
        "invalid": invalid,
    }
