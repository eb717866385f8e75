"""Delivery files with two faults each: which error comes first (ELSA-D-044)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from spec import plain_delivery as delivery
from spec.cases.build import (
    Entry,
    Profile,
    container,
    describe,
    dump_sorted,
    elsa_file,
    embedded,
    floats,
    frame,
    sign_header,
)
from spec.cases.delivery import Draft

WRONG = "xxh3:0123456789abcdef"
Change = Callable[[Any], Any]


@dataclass
class Parts:
    """A delivery file before it is put together, in pieces that faults change."""

    profile: Profile
    """Of the source."""
    document: Profile = field(default_factory=dict)
    """What the document says otherwise."""
    changes: dict[str, Change] = field(default_factory=dict)
    """What becomes of a piece, by its name."""

    def change(self, piece: str, change: Change) -> None:
        """Change a piece, after what others have changed."""
        before = self.changes.get(piece)
        self.changes[piece] = (lambda it: change(before(it))) if before else change

    def made(self, piece: str, it: Any) -> Any:
        """A piece as it goes into the file."""
        return self.changes.get(piece, lambda same: same)(it)


def entries_of(infinite: bool = False) -> list[Entry]:
    """Shared tensors before and behind the nested one, in blocks of their own."""
    pairs = [(0.5, 2), (1.5, 1), (0.1, 0), (-0.05, 0), (-1.25, 1), (0.3, 2)]
    words = embedded("w", [6], 2, pairs)
    if infinite:
        words.data = words.data[:12] + (0x7F800000).to_bytes(4, "little") + words.data[16:]
    return [Entry("a", "U8", [3], b"abc"), words, floats("z", [1.0, 2.5])]


def build(*names: str) -> bytes:
    """A file with these faults."""
    entries = entries_of("infinite" in names)
    parts = Parts(describe(entries, 2, ["1", "2"], ["w"]))
    draft = Draft(elsa_file(entries, parts.profile))
    for name, _, fault in reversed(FAULTS):
        if name in names:
            fault(parts)
    source = elsa_file(entries, parts.profile)
    start = 8 + int.from_bytes(source[:8], "little")
    draft.head = frame(parts.made("source", source[8:start]))
    draft.payloads[0][2] = parts.made("payload", draft.payloads[0][2])
    draft.parts = draft.indexed()
    draft.parts[0] = parts.made("part", draft.parts[0])
    draft.parts += parts.made("parts", [])
    draft.compress = parts.made("compress", draft.compress)
    draft.document |= parts.document
    data = draft.data()
    tensor = Entry(delivery.TENSOR, parts.made("dtype", "U8"), [len(data)], data)
    document = parts.made("document", dump_sorted(draft.document))
    raw = sign_header(container([tensor], {parts.made("key", delivery.DOCUMENT): document}))
    start = 8 + int.from_bytes(raw[:8], "little")
    return bytes(parts.made("file", frame(parts.made("header", raw[8:start]), raw[start:])))


Fault = tuple[str, str, Callable[[Parts], object]]


def changed(name: str, error: str, piece: str, change: Change) -> Fault:
    """A fault in a piece of the file."""
    return name, error, lambda parts: parts.change(piece, change)


def stated(name: str, error: str, **fields: object) -> Fault:
    """A fault in the delivery document."""
    return name, error, lambda parts: parts.document.update(fields)


def _more_counted(parts: Parts) -> None:
    parts.profile["nested"]["w"][0] += 1
    parts.profile["levels"][0]["nonzero"] += 1


FAULTS: list[Fault] = [
    changed("header", "InvalidJson", "header", lambda header: header[:-1] + b"]"),
    changed("dtype", "UnknownDtype", "dtype", lambda _: "U7"),
    changed("key", "NotElsa", "key", lambda _: "else"),
    changed("document", "InvalidJson", "document", lambda text: text + "x"),
    stated("version_form", "InvalidDelivery", version="1"),
    stated("version", "UnsupportedVersion", version="2.0"),
    stated("requires_form", "InvalidDelivery", requires="x"),
    stated("requires", "UnsupportedFeature", requires=["x"]),
    stated("header_form", "InvalidDelivery", header=WRONG[:-1]),
    stated("header_sum", "ChecksumMismatch", header=WRONG),
    stated("block", "InvalidDelivery", block=5),
    changed("trailing", "TrailingData", "file", lambda raw: raw + b"\0"),
    stated("head_sum", "ChecksumMismatch", head=WRONG),
    changed("head", "InvalidDelivery", "compress", lambda _: lambda head: head),
    changed("source_header", "InvalidJson", "source", lambda header: header[:-1] + b"]"),
    ("source_sum", "ChecksumMismatch", lambda parts: parts.profile.update(header=WRONG)),
    ("source_form", "InvalidProfile", lambda parts: parts.profile["levels"][0].update(name="")),
    ("source_fit", "ProfileMismatch", lambda parts: parts.profile["checksums"].update(x=WRONG)),
    ("nonzero", "CountMismatch", lambda parts: parts.profile["levels"][1].update(nonzero=6)),
    changed("parts", "InvalidDelivery", "parts", lambda none: [*none, b""]),
    changed("sizes", "InvalidDelivery", "part", lambda part: part + b"\0"),
    changed("payload_sum", "ChecksumMismatch", "part", lambda it: it[:-1] + bytes([it[-1] ^ 1])),
    changed("payload", "InvalidDelivery", "payload", lambda payload: payload + b"\0"),
    ("tensor_sum", "ChecksumMismatch", lambda parts: parts.profile["checksums"].update(a=WRONG)),
    ("infinite", "NonFinite", lambda _: None),
    ("counts", "CountMismatch", _more_counted),
    (
        *("digest", "DigestMismatch"),
        lambda parts: parts.profile["levels"][0].update(digest="sha256:" + "0" * 64),
    ),
]
"""Each is on a later line of ELSA-D-044 than the one before, or comes after it on the same line."""
ALIKE = [
    {"version_form", "version"},
    {"requires_form", "requires"},
    {"header_form", "header_sum"},
]
"""Faults of one field, which cannot have both."""


SCHEMA = {"version_form", "version", "requires_form", "requires", "header_form", "block"}
"""Faults that the JSON Schema sees."""


def pairs() -> Iterator[tuple[str, str, str]]:
    """Every two faults that a file can have, and the error that comes first."""
    for (first, error, _), (second, _, _) in combinations(FAULTS, 2):
        if {first, second} not in ALIKE:
            yield first, second, error


def neighbours() -> Iterator[tuple[str, str, str]]:
    """Each fault with the next one that has another error.

    TrailingData is left out: it is known last where the file is a stream.
    """
    errors = {name: error for name, error, _ in FAULTS}
    told = {"trailing"}
    for first, second, error in pairs():
        if first not in told and errors[second] != error:
            told.add(first)
            yield first, second, error
