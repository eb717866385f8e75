"""Broken delivery files: one for every rule that a file can break."""

import copy
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from spec import plain_delivery as delivery
from spec import plain_elsa as plain
from spec.cases import delivery_order
from spec.cases.build import (
    ZEROS,
    Entry,
    Profile,
    container,
    describe,
    dump,
    dump_sorted,
    elsa_file,
    embedded,
    floats,
    frame,
    pack_words,
)
from spec.cases.collection import Collection, error_of
from spec.cases.delivery import Draft, bell, ids, network, ship, trained, values
from spec.cases.delivery_example import DIGITS
from spec.cases.shards import make_index, make_shards, shard_name

# Cases that differ little from one that is committed: made by --extended only, for the tests.
EXTENDED = {
    "InvalidDelivery": """
        bits_few bits_outside bits_short block_21 block_float block_missing block_null
        code_one_symbol escape_missing lengths_cut gaps_many gaps_none h_254 head_adler
        head_checksum_missing head_dictionary head_empty head_end head_long head_method
        header_missing header_short index_long k_above mode_2_all parts_float parts_long
        parts_object parts_true payload_long plain_cut plain_empty requires_string sizes_beyond
        sizes_moved source_large source_missing stored_dense stored_long stored_short
        tensor_missing tensor_shape type_1_cut varint_size version_missing version_number""",
    "InvalidJson": "document_array ship_source",
    "DuplicateKey": "ship_document",
    "InvalidOffsets": "ship_source",
    "UnknownDtype": "ship_source",
    "UnsupportedVersion": "ship_source",
    "UnsupportedFeature": "ship_source",
    "InvalidProfile": "ship_source",
    "ProfileMismatch": "ship_source",
    "ChecksumMismatch": "ship_nested",
    "NonFinite": "ship_kept",
    "DigestMismatch": "ship_level_2",
    "InvalidIndex": "model-00002-of-00002 ship_lost ship_size",
}


class Broken:
    """Adds broken files to a collection."""

    def __init__(self, out: Collection) -> None:
        self.out = out

    def add(
        self,
        error: str,
        case: str,
        raw: bytes,
        requirements: str,
        description: str,
        *,
        schema: bool = False,
    ) -> None:
        """A file; `schema` says that the JSON Schema has to reject its document."""
        checked_by, level = seen_by(error, raw)
        self.put(
            f"invalid/{error}/{case}.ship.safetensors",
            raw,
            kind="delivery",
            verdict="invalid",
            error=error,
            checked_by=checked_by,
            level=level,
            schema="rejects" if schema else None,
            requirements=ids(requirements),
            description=description,
        )

    def put(self, file: str, raw: bytes, **fields: Any) -> None:
        """A file, if it is not for the larger set only."""
        _, error, name = file.split("/")
        if self.out.extended or name.split(".")[0] not in EXTENDED.get(error, "").split():
            self.out.add(file, raw, **fields)

    def __call__(
        self,
        case: str,
        draft: Draft,
        requirements: str,
        description: str,
        *,
        error: str = "InvalidDelivery",
        schema: bool = False,
    ) -> None:
        """A file that was made of a changed draft."""
        self.add(error, case, draft.build(), requirements, description, schema=schema)


def seen_by(error: str, raw: bytes) -> tuple[str, int | str | None]:
    """Who sees the error: on opening, on reading a level, or a Validator only."""

    def check(found: str | None) -> bool:
        if found not in (None, error):
            raise ValueError(f"a vector for {error} gives {found}")
        return found is not None

    if check(error_of(lambda: delivery.Delivery(raw))):
        return "reader", None
    opened = delivery.Delivery(raw)
    if not check(error_of(lambda: delivery.validate(raw))):
        raise ValueError(f"a vector for {error} is valid")
    for t in range(1, min(opened.parts_there, opened.levels) + 1):
        if check(error_of(partial(opened.level, t))):
            return "level", t
    if opened.parts_there > opened.levels and check(error_of(opened.whole)):
        return "level", "dense"
    return "full", None


# --- What is broken ------------------------------------------------------------------------------


def of_bytes(data: bytes = DIGITS) -> Draft:
    """One block of a shared tensor, h = 255 and one byte stream; nothing nested."""
    return Draft(network([Entry("b", "U8", [len(data)], data)], 1, 1, []))


PAIRS = [
    *((0.5, 2), (-0.4, 2), (1.5, 1), (0.1, 0), (-0.05, 0), (0.3, 2)),
    *((0.02, 0), (0.0, 0), (0.07, 0), (-1.25, 1), (0.09, 0), (-0.03, 0)),
]
"""2 of 12 weights are frozen at step 1, then 3 of 10 at step 2; 7 are dense only, one is zero."""


def weights() -> Entry:
    """The weights of the small network."""
    return embedded("w", [len(PAIRS)], 2, PAIRS)


def of_words() -> Draft:
    """A small network of one nested block and two levels."""
    return Draft(network([weights()], 2, 2, ["w"]))


def chosen(c: int) -> list[int]:
    """Its words with a counter."""
    words = delivery.to_words(weights().data, "F32")
    return [word for word in words if plain.counter(word, 2) == c]


def patched(data: bytes, at: int, *new: int) -> bytes:
    """Bytes with some of them replaced."""
    return data[:at] + bytes(new) + data[at + len(new) :]


def bomb(data: bytes, more: int) -> bytes:
    """A zlib stream of the head, and behind it so many times 258 spaces in 2 bits each."""
    bits = "0" + "00" + "00000"  # a stored block, not the last one
    out = delivery.pack((int(bit), 1) for bit in bits)
    size = len(data)
    out += size.to_bytes(2, "little") + (65535 - size).to_bytes(2, "little") + data

    def low_first(number: int, width: int) -> str:
        return f"{number:0{width}b}"[::-1]

    # Lengths of 286 + 1 codes in a code of its own, in which 0, 1, 2 and 18 have two bits each.
    order = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1]
    bits = "1" + "01" + low_first(29, 5) + low_first(0, 5) + low_first(len(order) - 4, 4)
    bits += "".join(low_first(2 if symbol in (0, 1, 2, 18) else 0, 3) for symbol in order)
    zero, one, two, run = "00", "01", "10", "11"

    def zeros(count: int) -> str:
        whole, rest = divmod(count, 138)
        long = (run + low_first(127, 7)) * whole
        return long + (run + low_first(rest - 11, 7) if rest >= 11 else zero * rest)

    # ' ' and the end have 2 bits, a match of 258 one bit, and so has the distance 1.
    bits += zeros(32) + two + zeros(223) + two + zeros(28) + one + one
    bits += "10" + "00" * more + "11"
    out += delivery.pack((int(bit), 1) for bit in bits)
    whole = data + b" " * (1 + 258 * more)
    return b"\x78\x01" + out + zlib.adler32(whole).to_bytes(4, "big")


# --- Container and document ----------------------------------------------------------------------


def add_containers(broken: Broken) -> None:
    """Wrong sizes, tensors and documents."""
    good = of_bytes().build()
    header_end = 8 + int.from_bytes(good[:8], "little")
    head_end = header_end + delivery.Delivery(good).ends[0]
    text = "ends one byte before the end of the header"
    broken.add("Truncated", "ship_header", good[: header_end - 1], "7 40 44", text)
    text = "ends with the header"
    broken.add("Incomplete", "head_missing", good[:header_end], "40 43 44", text)
    text = "ends one byte before the end of the head"
    broken.add("Incomplete", "head_cut", good[: head_end - 1], "40 44", text)
    broken.add("TrailingData", "ship", good + b"\0", "41 44", "one byte after the dense part")

    draft = of_bytes()
    text = "no delivery document, though the tensor is there"
    data = draft.data()
    raw = container([Entry(delivery.TENSOR, "U8", [len(data)], data)], {"format": "pt"})
    broken.add("NotElsa", "ship_no_document", raw, "7 44", text)
    raw = good.replace(b'"shape":[%d]' % len(data), b'"shape":[%d]' % (len(data) + 1))
    broken.add("InvalidOffsets", "ship", raw, "7 44", "a shape that is not the tensor's size")

    for case, text, entries in (
        ("tensor_name", "another name", [Entry("delivery", "U8", [len(data)], data)]),
        ("tensor_dtype", "dtype I8", [Entry(delivery.TENSOR, "I8", [len(data)], data)]),
        ("tensor_shape", "two dimensions", [Entry(delivery.TENSOR, "U8", [1, len(data)], data)]),
        (
            "tensor_second",
            "a second tensor, without elements",
            [Entry(delivery.TENSOR, "U8", [len(data)], data), Entry("x", "U8", [0], b"")],
        ),
        ("tensor_missing", "no tensor of that name", [Entry("x", "U8", [0], b"")]),
    ):
        draft = of_bytes()
        draft.tensors = entries
        broken(case, draft, "7", f"the tensor: {text}")


def add_documents(broken: Broken) -> None:
    """Documents that are wrong by themselves, and their order."""
    good = of_bytes()
    good.data()
    text = dump_sorted(good.document)

    def written(error: str, case: str, text: str, requirements: str, description: str) -> None:
        draft = of_bytes()
        draft.metadata = {delivery.DOCUMENT: text}
        broken(case, draft, requirements, description, error=error)

    written("InvalidJson", "ship_document", text[:-1], "7 44", "a document without its last }")
    written("InvalidJson", "document_array", f"[{text}]", "7", "an array in place of the document")
    twice = text.replace('"block":6', '"block":6,"block":6')
    written("DuplicateKey", "ship_document", twice, "7 44", "block twice in the document")

    def bad(
        case: str, description: str, schema: bool = True, requirements: str = "8", **change: Any
    ) -> None:
        draft = of_bytes()
        draft.document |= change
        broken(case, draft, requirements, description, schema=schema)

    bad("version_missing", "no version", version=..., requirements="8 R45")
    bad("version_number", "the version as a number", version=1.0, requirements="8 R45")
    bad("requires_string", "requires is a string", requires="x", requirements="8 R46")
    bad("header_missing", "no header checksum", header=...)
    bad("header_short", "a header checksum of 15 digits", header=ZEROS[:-1])
    bad("block_missing", "no block", block=...)
    bad("block_null", "block is null", block=None)
    bad("block_5", "block is 5", block=5)
    bad("block_21", "block is 21", block=21)
    bad("block_float", "block is 6.0, not written as an integer", False, "8 R21", block=6.0)
    bad("source_missing", "no source", source=...)
    bad("source_9", "source is 9", source=9)
    bad("source_large", "source is 100,000,009", source=100_000_009)
    bad("head_checksum_missing", "no checksum of the head", head=...)
    bad("head_checksum_upper", "a checksum in upper case", head="xxh3:" + "A" * 16)
    parts = good.document["parts"]
    bad("parts_missing", "no parts", parts=...)
    bad("parts_short", "two parts", parts=[parts[0], parts[1]])
    bad("parts_long", "258 parts", parts=[*parts, *[0] * 255])
    bad("parts_negative", "a negative size", parts=[parts[0] + 1, parts[1], -1])
    bad("parts_float", "a size written 0.0", False, "8 R21", parts=[*parts[:2], 0.0])
    bad("parts_true", "false as a size", parts=[*parts[:2], False])
    bad("parts_object", "parts by name", parts={"head": parts[0]})
    text = "the parts are one byte more than the tensor"
    bad("parts_sum", text, False, "9", parts=[parts[0], parts[1] + 1, 0])
    text = "the parts are one byte less than the tensor"
    bad("parts_less", text, False, "9", parts=[parts[0], parts[1] - 1, 0])

    draft = of_bytes()
    draft.document |= {"version": "2.0", "block": 5}
    text = "a version 2.0; comes before what is wrong in its fields"
    broken("ship", draft, "8 44 R45", text, error="UnsupportedVersion", schema=True)
    draft = of_bytes()
    draft.document |= {"requires": ["x"], "header": "xxh3:" + "1" * 16}
    text = "an unknown feature; comes before the header's checksum"
    broken("ship", draft, "8 44 R46", text, error="UnsupportedFeature", schema=True)
    draft = of_bytes()
    draft.document |= {"header": "xxh3:0123456789abcdef", "block": 5}
    text = "a wrong header checksum; comes before what is wrong in the document"
    broken("ship_header", draft, "8 44 R63", text, error="ChecksumMismatch")
    draft = of_bytes()
    draft.document |= {"block": 5}
    text = "a wrong block, and a byte after the dense part, which comes later"
    raw = draft.build() + b"\0"
    broken.add("InvalidDelivery", "document_first", raw, "8 44", text, schema=True)


# --- Head ----------------------------------------------------------------------------------------


def add_heads(broken: Broken) -> None:
    """Heads that are no zlib stream of a header, and headers of no ELSA file."""

    def stream(
        case: str, text: str, compress: Callable[[bytes], bytes], requirements: str = "11"
    ) -> None:
        draft = of_bytes()
        draft.compress = compress
        broken(case, draft, requirements, text)

    stored = delivery.stored_zlib
    stream("head_raw", "the header, not compressed", lambda head: head)
    stream("head_empty", "a head of no byte", lambda _: b"")
    stream(
        "head_method", "a zlib header with another method", lambda h: b"\x77\x05" + stored(h)[2:]
    )
    dictionary = b"\x78\x20\0\0\0\1"
    stream("head_dictionary", "a preset dictionary", lambda head: dictionary + stored(head)[2:])
    stream("head_trailing", "a byte behind the zlib stream", lambda head: stored(head) + b"\0")
    stream("head_end", "a zlib stream without its last byte", lambda head: stored(head)[:-1])
    stream("head_adler", "a wrong Adler-32", lambda h: stored(h)[:-4] + b"\0\0\0\0")
    stream("head_short", "one byte less than source says", lambda head: stored(head[:-1]))
    stream("head_long", "one byte more than source says", lambda head: stored(head + b" "))
    text = "a megabyte more than source says: to be noticed before it is there"
    stream("head_bomb", text, lambda head: bomb(head, 4100), "5 11")
    draft = of_bytes()
    draft.head = patched(draft.head, 0, draft.head[0] - 1)
    text = "a header length that is one less than the bytes behind it"
    broken("head_length", draft, "11 44", text)
    draft = of_bytes()
    draft.head = patched(draft.head, 0, draft.head[0] + 1)
    text = "a header length that is one more than the bytes behind it; not Truncated"
    broken("head_length_high", draft, "11 44", text)

    draft = of_bytes()
    draft.document["head"] = "xxh3:0123456789abcdef"
    draft.compress = lambda head: head
    text = "a wrong checksum of the head; comes before what is in it"
    broken("ship_head", draft, "11 44", text, error="ChecksumMismatch")

    entries = [Entry("b", "U8", [len(DIGITS)], DIGITS)]
    profile = describe(entries, 1, ["a"], [], digests=False, checksums=False)

    def source(
        error: str,
        case: str,
        requirements: str,
        text: str,
        change: Profile | None = None,
        old: bytes = b"",
        new: bytes = b"",
    ) -> None:
        """A head that holds another header."""
        draft = of_bytes()
        made = elsa_file(entries, copy.deepcopy(profile) | (change or {"header": ZEROS}))
        header = made[8 : -len(DIGITS)]
        if old not in header:
            raise ValueError(f"{case}: {old!r} is not in the header")
        draft.head = frame(header.replace(old, new) if old else header)
        broken(case, draft, requirements, "the source: " + text, error=error)

    source("InvalidJson", "ship_source", "13 44", "an array", old=b"{", new=b"[")
    source("NotElsa", "ship_source", "13 44", "no profile", old=b'"elsa"', new=b'"else"')
    text = "an unknown dtype"
    source("UnknownDtype", "ship_source", "13", text, old=b'"U8"', new=b'"U7"')
    text = "a tensor that does not begin at 0"
    old, new = b"[0,24]", b"[1,25]"
    source("InvalidOffsets", "ship_source", "13", text, old=old, new=new)
    source("UnsupportedVersion", "ship_source", "13", "version 2.0", {"version": "2.0"})
    text = "an unknown feature"
    source("UnsupportedFeature", "ship_source", "13", text, {"requires": ["x"]})
    text = "another header than its checksum says"
    source("ChecksumMismatch", "ship_source", "13 44", text, old=b'"b"', new=b'"c"')
    source("InvalidProfile", "ship_source", "13", "bits is 9", {"bits": 9})
    text = "a nested tensor of dtype U8"
    source("ProfileMismatch", "ship_source", "13", text, {"nested": {"b": [0]}})
    levels = [{"name": "a", "nonzero": 1}]
    source("CountMismatch", "ship_source", "13", "nonzero is 1, counts are 0", {"levels": levels})
    levels = [{"name": "a", "nonzero": 0}, {"name": "b", "nonzero": 0}]
    text = "two levels in three parts"
    source("InvalidDelivery", "levels", "13 44", text, {"levels": levels, "bits": 2})


# --- Parts ---------------------------------------------------------------------------------------


def add_parts(broken: Broken) -> None:
    """Indexes that do not fit, and payloads that were changed."""

    def part(case: str, data: bytes, requirements: str, text: str, **more: Any) -> None:
        draft = of_bytes()
        draft.parts = [data, b""]
        broken(case, draft, requirements, text, **more)

    good = of_bytes().indexed()[0]
    size = good[0]
    part("index_cut", good[:2], "15", "a part that is shorter than its index")
    part("index_long", patched(good, 0, size + 1), "15", "a payload that ends behind its part")
    part("index_short", patched(good, 0, size - 1), "15 44", "a byte behind the last payload")
    text = "a payload of more than n·W/8 + ⌈n/8⌉ + 1024 bytes; comes before its checksum"
    part("payload_size", (1052).to_bytes(3, "little") + bytes(8 + 1052), "18 44", text)
    text = "one byte of a payload changed; comes before what it decodes to"
    changed = patched(good, 12, 3)
    part("ship_payload", changed, "18 44", text, error="ChecksumMismatch")

    # 12 bits for each of 3000 bytes: what a Reader without the limit would take.
    data = bytes(i % 8 + 8 for i in range(3000))
    lengths = {**{i: i + 1 for i in range(8)}, **dict.fromkeys(range(8, 24), 12)}
    draft = Draft(network([Entry("b", "U8", [3000], data)], 1, 1, []), 18)
    draft.payloads[0] = [b"\xff\2" + delivery.write_huffman(data, lengths)]
    text = "a payload that decodes, and is longer than it may be"
    broken("payload_long", draft, "18", text)

    draft = of_words()
    draft.parts = draft.indexed()
    draft.parts[-1] = patched(draft.parts[-1], 3, draft.parts[-1][3] ^ 1)
    text = "a wrong checksum in the dense part"
    broken("ship_dense", draft, "18", text, error="ChecksumMismatch")
    draft = Draft(network([floats("w", [0.5, 0.25])], 1, 1, ["w"]))
    draft.parts = draft.indexed()
    draft.parts[0] += bytes(8)
    text = "a checksum of an empty payload, which has none"
    broken("checksum_empty", draft, "15", text)

    draft = of_bytes()
    header = dump({"b": {"dtype": "U8", "shape": [2**59], "data_offsets": [0, 2**59]}})
    profile = describe([], 1, ["a"], [], digests=False, checksums=False, header=False)
    metadata = dump({"__metadata__": {"elsa": dump_sorted(profile)}})
    draft.head = frame((metadata[:-1] + "," + header[1:]).encode())
    text = "2^59 bytes in the source's header: 2^53 blocks, and an index of one"
    broken("index_huge", draft, "5 15", text)


def add_blocks(broken: Broken) -> None:
    """Payloads that do not fit their blocks, positions and counts."""
    level, dense = chosen(1), chosen(0)
    coded = delivery.write_values(level, "F32", 2)
    good = of_words().payloads[0][0]

    def payload(
        case: str, data: bytes, requirements: str, text: str, part: int = 1, **parts: bytes
    ) -> None:
        """A payload in part 1 or 2, or in the dense part, 0; `stored` in part 1 beside it."""
        draft = of_words()
        if "stored" in parts:
            draft.payloads = [[parts["stored"]], [b""], [b""]]
        draft.payloads[part - 1] = [data]
        broken(case, draft, requirements, text)

    def positions(case: str, data: bytes, text: str, requirements: str = "25 26") -> None:
        payload(case, b"\2" + data + coded, requirements, text)

    payload("trailing", good + b"\0", "21", "a byte behind the values")
    payload("cut", good[:-1], "21", "the last byte of the values is missing")
    payload("k_long", b"\x82\0" + good[1:], "21", "k = 2 as a varint of two bytes")
    payload("k_huge", b"\xff" * 9 + b"\1" + good[1:], "21", "a varint of 2^63 and more")
    payload("k_zero", b"\0\0" + coded, "20", "k = 0 in a payload that is not empty", 2)
    payload("k_above", b"\x0d\0" + coded, "20 25", "13 of 12 words")
    text = "4 of 3 words: part 1 took the other nine"
    nine = [word & ~3 | 1 for word in delivery.to_words(weights().data, "F32")[:9]]
    first = b"\x09\3" + b"\xff\1" + delivery.write_values(nine, "F32", 2)
    draft = of_words()
    four = b"\4\0" + delivery.write_values([word & ~3 | 2 for word in nine[:4]], "F32", 2)
    draft.payloads[:2] = [[first], [four]]
    broken("k_left", draft, "20 25", text)

    positions("mode_5", b"\5", "mode 5", "25")
    positions("mode_0_some", b"\0", "mode 0 with 2 of 12 words", "25")
    text = "mode 1 with all words that are left"
    values_ = delivery.write_values(dense, "F32", 2)
    payload("mode_1_all", b"\7\1\7\1\0" + values_, "25", text, 0)
    text = "mode 2 with all words that are left"
    payload("mode_2_all", b"\7\2\0" + values_, "25", text, 0)
    positions("gaps_beyond", b"\1\2\0\2\x09", "the second gap leads behind the last word")
    positions("gaps_few", b"\1\1\1\2", "one mark, k = 2")
    positions("gaps_many", b"\1\3\1\2", "three marks, k = 2")
    positions("gaps_none", b"\1\0", "no mark, k = 2")
    positions("gaps_marks", b"\2\2\0\2\6", "two marks in mode 2, r - k = 10")
    count = delivery.varint(2**40)
    positions("gaps_bomb", b"\1" + count + b"\1\0", "2^40 gaps, all 0, in 9 bytes", "5 26")
    zeros = Draft(network([Entry("w", "F16", [600], b"\1" + bytes(1199))], 1, 1, ["w"]), 10)
    one = delivery.write_values([1], "F16", 1)
    zeros.payloads[0] = [b"\1\1\2\0\0\xff" + one]
    broken("gaps_last", zeros, "26", "a gap of 255 behind the last mark")
    positions("bits_few", b"\3\4\0", "one bit set, k = 2", "27")
    positions("bits_unused", b"\3\4\x12", "bit 12 of 12 is set too", "27")
    positions("bits_outside", b"\3\4\x10", "the second bit is behind the words", "27")
    payload("bits_short", b"\2\3\4", "27", "bits for 8 of 12 words, and no values")

    words = delivery.to_words(weights().data, "F32")
    stored = delivery.store_block(words, "F32", 2)
    text = "a block that is stored in part 2"
    payload("stored_later", b"\3" + stored[1:], "22 25", text, 2)
    text = "a stored block with two counters 1, k = 3"
    payload("stored_count", b"\3" + stored[1:], "22", text, stored=stored)
    text = "a stored block with a counter 3, T = 2"
    high = delivery.store_block([*words[:-1], words[-1] | 3], "F32", 2)
    payload("stored_counter", high, "22", text, stored=stored)
    payload("stored_short", stored[:-4], "22", "a stored block of 11 words", stored=stored)
    payload("stored_long", stored + bytes(4), "21 22", "a stored block of 13 words", stored=stored)
    again = of_words().payloads
    text = "a stored block that goes on in part 2"
    payload("stored_again", again[1][0], "22", text, 2, stored=stored)
    text = "a stored block that goes on in the dense part"
    payload("stored_dense", again[2][0], "22", text, 0, stored=stored)

    payload("dense_missing", b"", "24", "seven words are in no part", 0)
    six = delivery.write_values(dense[:6], "F32", 2)
    payload("dense_few", b"\6\3\x3f" + six, "24", "one word is in no part", 0)

    counts = {"nested": {"w": [3, 5]}}
    levels = [{"name": "1", "nonzero": 3}, {"name": "2", "nonzero": 5}]
    profile = describe([weights()], 2, ["1", "2"], ["w"], digests=False, checksums=False)
    draft = Draft(elsa_file([weights()], profile | counts | {"levels": levels}))
    text = "the profile says 3 weights at level 1, part 1 has 2"
    broken("ship_data", draft, "6 24 44", text, error="CountMismatch")


# --- Values and streams --------------------------------------------------------------------------


def add_values(broken: Broken) -> None:
    """Values that do not fit."""
    level, dense = chosen(1), chosen(0)

    def payload(case: str, data: bytes, requirements: str, text: str, part: int = 1) -> None:
        draft = of_words()
        k = b"\2\3\4\2" if part == 1 else b"\7\0"
        draft.payloads[part - 1] = [k + data]
        broken(case, draft, requirements, text)

    good = delivery.write_values(level, "F32", 2)
    payload("h_6", b"\6" + good[1:], "29", "h = 6")
    payload("h_254", b"\xfe" + good[1:], "29", "h = 254")
    draft = of_bytes()
    draft.payloads[0] = [b"\0\0\1\0" + bytes(3)]
    broken("h_integer", draft, "29", "h = 0 for words of dtype U8")
    entry = Entry("w", "BF16", [8], trained("BF16", bell(6, 8), 3, [8]))
    draft = Draft(network([entry], 3, 1, ["w"]))
    draft.payloads[0] = [b"\x08\0\5\0\1\0"]
    broken("h_mantissa", draft, "29", "h = 5 in BF16 with tau = 3, where 4 bits are left")
    largest = [0x7FFFFFFF, 0xFFFFFFFF]
    draft = Draft(network([Entry("b", "F32", [2], pack_words("F32", largest))], 1, 1, []))
    draft.payloads[0] = [values(largest, "F32", 0, 5, above=1)]
    broken("top_large", draft, "29", "top = 2^13 with h = 5 in F32")
    text = "a distance of 4 from a top of 3"
    rest = delivery.write_rest([0, 0], 22)
    payload("distance", b"\0\3\0\0\4" + rest, "31", text)
    escaped = values(dense, "F32", 2, 5)
    word = escaped.index(b"\xff") + 1
    while escaped[word : word + 4] != bytes(4):
        word += 1
    text = "an escape with the counter 1 in the dense part"
    payload("escape_counter", patched(escaped, word, 1), "31", text, 0)
    payload("escape_missing", escaped[: word + 2], "21 31", "half an escape", 0)
    payload("rest_unused", patched(good, len(good) - 1, good[-1] | 128), "30", "an unused bit")


def add_streams(broken: Broken) -> None:
    """Byte streams, in the one block of a shared tensor."""

    def stream(case: str, coded: bytes, requirements: str, text: str, data: bytes = DIGITS) -> None:
        draft = of_bytes(data)
        draft.payloads[0] = [b"\xff" + coded]
        broken(case, draft, requirements, text)

    good = delivery.write_stream(DIGITS)
    stream("plain_empty", b"", "19", "no byte of values, but for h")
    draft = of_bytes()
    draft.payloads[0] = [b""]
    broken("plain_cut", draft, "19 21", "an empty payload of a plain block")
    stream("type_3", patched(good, 0, 3), "33", "type 3")
    stream("type_0_short", b"\0" + DIGITS[:-1], "33", "23 of 24 bytes")
    stream("type_0_long", b"\0" + DIGITS + b"\0", "21 33", "25 of 24 bytes")
    stream("type_1_cut", b"\1", "33", "type 1 without its byte")
    # 02, 09, lengths, sizes 03 03 03 03, and four streams.
    lengths = delivery.code_lengths(Counter(DIGITS))
    table = [lengths.get(symbol, 0) for symbol in range(10)]
    sizes = 2 + len(delivery.write_lengths(table))
    four = dict.fromkeys(DIGITS, 4)
    text = "lengths that do not fill the code: 9 codewords of 4 bits"
    stream("code_under", b"\2" + delivery.write_huffman(DIGITS, four), "35", text)
    over = lengths | {10: 12}
    text = "lengths that more than fill the code, by a symbol that does not occur"
    stream("code_over", b"\2" + delivery.write_huffman(DIGITS, over), "35", text)
    text = "a length of which the list has not so many: 13 ones"
    stream("length_place", b"\2\x09\xff\x1f" + good[4:], "38", text)
    stream("lengths_cut", b"\2\xff" + bytes(31), "21 38", "248 of 256 lengths, and no more")
    one = b"\2\5" + delivery.write_lengths([0, 0, 0, 0, 0, 1]) + b"\1\1\1\1" + bytes(4)
    stream("code_one_symbol", one, "35", "one symbol, of length 1", b"\5" * 24)
    text = "the last symbol has no codeword"
    absent = b"\2\x0a" + delivery.write_lengths([*table, 0]) + good[sizes:]
    stream("last_absent", absent, "38", text)
    text = "an unused bit behind the lengths is set"
    three = b"\0\1\2\0" * 15
    coded = delivery.write_stream(three)  # 02, 02, lengths in 27 bits of ff ef ff 01
    stream("lengths_unused", patched(coded, 5, 0x81), "38", text, three)
    text = "one byte more than the codewords of a bit stream need"
    stream(
        "bits_more", patched(good, sizes, 4)[: sizes + 7] + b"\0" + good[sizes + 7 :], "39", text
    )
    text = "one byte less than the codewords of the last bit stream need"
    stream("bits_less", patched(good, sizes + 3, 2)[:-1], "39", text)
    text = "a byte of one bit stream counted to the one before"
    stream("sizes_moved", patched(good, sizes, 4, 2), "38 39", text)
    stream("bits_set", patched(good, len(good) - 1, good[-1] | 128), "39", "an unused bit is set")
    text = "the size of a bit stream as a varint of two bytes"
    stream("varint_size", good[:sizes] + b"\x83\0" + good[sizes + 1 :], "21 38", text)
    stream("sizes_beyond", patched(good, sizes + 3, 100), "38", "a bit stream that ends behind all")
    text = "two symbols in four bit streams, of which the last has a byte"
    pair = b"\2\1" + delivery.write_lengths([1, 1]) + b"\1\1\0\1" + b"\0\1\0"
    stream("stream_empty", pair, "38 39", text, b"\0\1")


# --- Data and shards -----------------------------------------------------------------------------


def add_data(broken: Broken) -> None:
    """What can be decoded and is not what the source's profile says."""
    entries = [weights(), floats("b", [1.0, 2.0])]

    def data(
        error: str, case: str, requirements: str, text: str, change: Callable[[Profile], object]
    ) -> None:
        profile = describe(entries, 2, ["1", "2"], ["w"])
        change(profile)
        broken(case, Draft(elsa_file(entries, profile)), requirements, text, error=error)

    wrong = "xxh3:0123456789abcdef"
    for case, name in (("ship_shared", "b"), ("ship_nested", "w")):
        text = f"the checksum of {name} is not that of the tensor"
        data(
            *("ChecksumMismatch", case, "6 44 R61", text),
            lambda profile, name=name: profile["checksums"].update({name: wrong}),  # type: ignore[misc]
        )
    digest = {"digest": "sha256:" + "0" * 64}
    for t in (1, 2):
        text = f"a digest of zeros at level {t}"
        data(
            *("DigestMismatch", f"ship_level_{t}", "6 44 R60", text),
            lambda profile, t=t: profile["levels"][t - 1].update(digest),  # type: ignore[misc]
        )
    for case, word in (("ship_dense", 0x7F800000), ("ship_kept", 0xFFC00001)):
        words = [*delivery.to_words(weights().data, "F32")[:3], word]
        entry = Entry("w", "F32", [4], pack_words("F32", words))
        text = "Inf in the dense part" if word % 2 == 0 else "a NaN in part 1"
        draft = Draft(network([entry], 2, 2, ["w"]))
        broken(case, draft, "6 44 R42", text, error="NonFinite")


def add_shards(broken: Broken) -> None:
    """Indexes of delivery files."""
    shards = make_shards()
    index = make_index(shards)
    names = {shard_name(i): shard_name(i).replace(".safe", ".ship.safe") for i in (1, 2)}
    shipped = {names[shard_name(i)]: ship(elsa_file(*shard)) for i, shard in enumerate(shards, 1)}

    def case(error: str, name: str, requirements: str, text: str, **change: Any) -> None:
        document = copy.deepcopy(index)
        renamed = {key: names[file] for key, file in index["weight_map"].items()}
        document |= {"weight_map": renamed} | change
        broken.put(
            f"invalid/{error}/{name}.ship.safetensors.index.json",
            dump_sorted(document).encode(),
            kind="delivery_index",
            verdict="invalid",
            error=error,
            checked_by="reader",  # confirmed in check_indexes, once the shards are on disk
            requirements=ids(requirements),
            description=text,
        )

    for name, raw in shipped.items():
        broken.put(
            f"invalid/InvalidIndex/{name}",
            raw,
            kind="delivery",
            verdict="valid",
            requirements=ids("42"),
            description="a shard that the broken indexes beside it name",
        )
    mixed = {
        key: names[file] if file == shard_name(1) else file
        for key, file in index["weight_map"].items()
    }
    text = "a delivery file beside an ELSA file"
    case("InvalidIndex", "mixed", "42", text, weight_map=mixed)
    broken.put(
        "invalid/InvalidIndex/zz.ship.safetensors",
        shipped[names[shard_name(1)]] + b"\0",
        kind="delivery",
        verdict="invalid",
        error="TrailingData",
        checked_by="reader",
        requirements=ids("41"),
        description="a shard that a broken index beside it names, one byte longer than it says",
    )
    first = {
        key: "zz.ship.safetensors" if file == shard_name(1) else file
        for key, file in index["weight_map"].items()
    }
    text = "an ELSA file comes before the error of a delivery file whose name is behind its own"
    case("InvalidIndex", "mixed_first", "42 44", text, weight_map=first)
    text = "a total size of the delivery files, not of the tensors"
    size = sum(len(raw) for raw in shipped.values())
    case("InvalidIndex", "ship_size", "42 R74", text, metadata={"total_size": size})
    lost = {key: names[file] for key, file in index["weight_map"].items() if key != "c"}
    text = "a tensor of a source that is not in the map"
    case("InvalidIndex", "ship_lost", "42 R74", text, weight_map=lost)


def add_order(broken: Broken) -> None:
    """Two faults in one file: the one whose line is first is told."""
    for first, second, error in delivery_order.neighbours():
        # Few of them are committed, all are made by --extended.
        if broken.out.extended or first == "payload":
            text = f"two faults, {first} and {second}: the first is told"
            raw = delivery_order.build(first, second)
            schema = bool({first, second} & delivery_order.SCHEMA) and error != "InvalidJson"
            broken.add(error, f"{first}_{second}", raw, "44", text, schema=schema)


def add_shard_order(broken: Broken) -> None:
    """Two faults in two shards: lines are about all shards, not about one after the other."""
    if not broken.out.extended:
        return
    for error, name, fault in (
        ("InvalidDelivery", "shards_payload", "payload"),
        ("ChecksumMismatch", "shards_sum", "tensor_sum"),
    ):
        shards = make_shards()
        first, second = (profile for _, profile in shards)
        first["nested"]["a"][0] += 1
        for _, profile in shards:
            profile["levels"][0]["nonzero"] += 1
        if fault == "tensor_sum":
            second["checksums"]["c"] = delivery_order.WRONG
        drafts = [Draft(elsa_file(*shard)) for shard in shards]
        if fault == "payload":
            drafts[1].payloads[0][-1] += b"\0"
        files = [f"{name}-0000{number}-of-00002" for number in (1, 2)]
        text = f"one of two shards: the counts of the first are wrong, and {fault} of the second"
        for file, draft, own in zip(files, drafts, ("CountMismatch", error), strict=True):
            raw = draft.build()
            checked_by, level = seen_by(own, raw)
            broken.put(
                f"invalid/{error}/{file}.ship.safetensors",
                raw,
                kind="delivery",
                verdict="invalid",
                error=own,
                checked_by=checked_by,
                level=level,
                requirements=ids("42 44"),
                description=text,
            )
        index = make_index(shards)
        names = {shard_name(i): f"{file}.ship.safetensors" for i, file in enumerate(files, 1)}
        index["weight_map"] = {key: names[file] for key, file in index["weight_map"].items()}
        broken.put(
            f"invalid/{error}/{name}.ship.safetensors.index.json",
            dump_sorted(index).encode(),
            kind="delivery_index",
            verdict="invalid",
            error=error,
            checked_by="reader",  # confirmed in check_indexes, once the shards are on disk
            requirements=ids("42 44"),
            description="wrong counts in the first shard come after what is wrong in the second",
        )


def add_cases(out: Collection) -> None:
    """All broken delivery files."""
    broken = Broken(out)
    add_containers(broken)
    add_documents(broken)
    add_heads(broken)
    add_parts(broken)
    add_blocks(broken)
    add_values(broken)
    add_streams(broken)
    add_data(broken)
    add_order(broken)
    add_shards(broken)
    add_shard_order(broken)
