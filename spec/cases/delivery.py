"""Valid delivery files: every dtype, τ, number of levels, mode and stream, and odd sources."""

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

import xxhash

from spec import plain_delivery as delivery
from spec import plain_elsa as plain
from spec.cases import delivery_example
from spec.cases.build import (
    ZEROS,
    Entry,
    Profile,
    container,
    describe,
    dump_sorted,
    elsa_file,
    floats,
    make_words,
    numbers,
    pack_words,
    sign_header,
    weights,
)
from spec.cases.collection import Collection
from spec.cases.shards import make_index, make_shards, shard_name

EXAMPLE = "valid/delivery/example.ship.safetensors"


def ids(numbers_: str) -> list[str]:
    """'1 23 R79' as requirement ids."""
    return [
        f"ELSA-R-{int(number[1:]):03}" if number.startswith("R") else f"ELSA-D-{int(number):03}"
        for number in numbers_.split()
    ]


def fixed(data: bytes) -> bytes:
    """A zlib stream in the fixed codes of RFC 1951 §3.2.6: compressed, and the same everywhere."""

    def split(number: int, codes: int, per_step: int) -> tuple[int, str]:
        """A length - 3 or distance - 1 as its code and extra bits, lowest first."""
        extra = max(0, number.bit_length() - codes.bit_length())
        low = number % (1 << extra)
        code = (number >> extra) + extra * per_step
        return code, f"{low:0{extra}b}"[::-1] if extra else ""

    bits = ["1", "10"]  # the last block; type 1, its low bit first
    before: dict[bytes, int] = {}
    at = 0
    while at < len(data):
        start, length = before.get(data[at : at + 3], -1), 0
        # 258 would need a code of its own.
        while start >= max(0, at - 32768) and length < min(257, len(data) - at):
            if data[start + length] != data[at + length]:
                break
            length += 1
        if length >= 3:
            code, extra = split(length - 3, 7, 4)
            bits += [f"{code + 1:07b}" if code < 23 else f"{code - 23 + 0xC0:08b}", extra]
            code, extra = split(at - start - 1, 3, 2)
            bits += [f"{code:05b}", extra]
        else:
            length, byte = 1, data[at]
            bits.append(f"{byte + 0x30:08b}" if byte < 144 else f"{byte - 144 + 0x190:09b}")
        for i in range(at, at + length):
            before[data[i : i + 3]] = i
        at += length
    packed = delivery.pack((int(bit), 1) for bit in "".join(bits) + "0000000")
    return b"\x78\x01" + packed + zlib.adler32(data).to_bytes(4, "big")


class Draft:
    """A delivery file in pieces that can be changed one by one."""

    def __init__(self, source: bytes, block: int = 6) -> None:
        elsa = plain.open_elsa(source)
        self.head = source[: 8 + len(elsa.container.header)]
        """As it is before compression."""
        self.payloads = delivery.write_parts(elsa, block)
        """Of parts 1…T and the dense part."""
        self.parts: list[bytes] = []
        """In place of the payloads with their index, if given."""
        self.compress: Callable[[bytes], bytes] = delivery.stored_zlib
        self.document: Profile = {"version": "1.0", "block": block, "header": ZEROS}
        self.metadata: dict[str, str] = {}
        self.tensors: list[Entry] = []
        """In place of the one tensor, if given."""

    def data(self) -> bytes:
        """All parts; the document gets to know them."""
        compressed = self.compress(self.head)
        parts = self.parts or self.indexed()
        made = {
            "parts": [len(part) for part in (compressed, *parts)],
            "source": len(self.head),
            "head": "xxh3:" + xxhash.xxh3_64_hexdigest(compressed),
        }
        self.document = made | self.document
        return b"".join([compressed, *parts])

    def indexed(self) -> list[bytes]:
        """The payloads with their index."""
        return [delivery.part_bytes(payloads, self.head) for payloads in self.payloads]

    def build(self) -> bytes:
        """The file; keys of the document whose value is `...` are left out."""
        data = self.data()
        document = {key: value for key, value in self.document.items() if value is not ...}
        metadata = {delivery.DOCUMENT: dump_sorted(document)} | self.metadata
        tensors = self.tensors or [Entry(delivery.TENSOR, "U8", [len(data)], data)]
        return sign_header(container(tensors, metadata))


# --- Sources -------------------------------------------------------------------------------------


def network(entries: Sequence[Entry], tau: int, levels: int, nested: Sequence[str]) -> bytes:
    """An ELSA file without digests and checksums; its digests are in the manifest."""
    names = [str(t) for t in range(1, levels + 1)]
    profile = describe(entries, tau, names, nested, digests=False, checksums=False)
    return elsa_file(entries, profile)


def bell(seed: int, count: int) -> list[int]:
    """Numbers around 0 that are mostly small, as weights are: below 2^23 in magnitude."""
    random = numbers(seed)
    return [sum(next(random) % 2**21 for _ in range(8)) - 8 * 2**20 for _ in range(count)]


def trained(dtype: str, values: Sequence[int], tau: int, kept: Sequence[int]) -> bytes:
    """Weights as integers · 2^-24, the largest frozen first: so many at each level."""
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    steps = [0] * len(values)
    for t in range(len(kept), 0, -1):
        for i in order[: kept[t - 1]]:
            steps[i] = t
    return to_words(dtype, values, tau, steps)


def to_words(dtype: str, values: Sequence[int], tau: int, steps: Sequence[int]) -> bytes:
    """Integers · 2^-24 with counters, truncated to the dtype."""
    mantissa = plain.MANTISSA[dtype]
    bias = plain.infinity(dtype) // 2 >> mantissa
    words = []
    for value, step in zip(values, steps, strict=True):
        magnitude, sign = abs(value), plain.sign_bit(dtype) if value < 0 else 0
        exponent = magnitude.bit_length() - 1
        word = 0
        if magnitude and exponent - 24 + bias > 0:  # a denormal becomes 0
            fraction = (magnitude << 64 >> exponent) - (1 << 64) >> (64 - mantissa)
            word = (exponent - 24 + bias << mantissa) + fraction
        words.append(plain.embed(sign | word, step, dtype, tau, "overwrite"))
    return pack_words(dtype, words)


FIBONACCI = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377]
"""Counts whose Huffman code is as deep as can be."""
TWICE = [1, 2, 2, 5, 10, 20, 33, 45, 95, 188, 257, 431, 698, 1241]
"""Counts that have to be halved twice until 12 bits are enough."""


def mixed(counts: Sequence[int]) -> bytes:
    """So many of each of some symbols, in a mixed order."""
    left = [7 * i for i, count in enumerate(counts) for _ in range(count)]
    random, out = numbers(5), bytearray()
    while left:
        out.append(left.pop(next(random) % len(left)))
    return bytes(out)


def streams() -> list[Entry]:
    """One byte stream each, as every dtype of 8 bits is a sequence of its own."""
    random = numbers(9)
    return [
        Entry("13 bits, twice", "U8", [3028], mixed(TWICE)),
        Entry("13 bits, then 7", "F6_E3M2", [1316], mixed(FIBONACCI) + b"\x5b"),
        Entry("12 bits", "F6_E2M3", [812], mixed(FIBONACCI[:-1])),
        Entry("all symbols alike", "I8", [512], bytes(range(256)) * 2),
        Entry("one bit a symbol", "BOOL", [70], bytes(next(random) % 2 for _ in range(70))),
        Entry("symbols 3 and 255", "F8_E5M2", [300], b"\3\3\3\xff" * 75),
        Entry("constant", "F8_E4M3", [600], b"\x80" * 600),
        Entry("ties", "F8_E8M0", [60], bytes(i % 12 // 2 for i in range(60))),
        Entry("too short to code", "F8_E4M3FNUZ", [7], b"\1\1\1\1\1\1\0"),
        Entry("no shorter if coded", "F8_E5M2FNUZ", [10], b"\1\1\1\1\1\1\0\0\0\0"),
        Entry("a byte shorter if coded", "F4", [22], b"\1\1\1\1\1\1\0\0\0\0\0"),
    ]


def pattern() -> bytes:
    """1:4, then 2:4: of each four weights the largest two."""
    values = bell(21, 256)
    steps = [0] * 256
    for at in range(0, 256, 4):
        for t, i in enumerate(sorted(range(at, at + 4), key=lambda i: -abs(values[i]))[:2], 1):
            steps[i] = t
    return to_words("F16", values, 2, steps)


def uneven(dtype: str, seed: int, count: int) -> bytes:
    """Weights of every other octave, dense only: distances that are not all there."""
    values = [v if abs(v).bit_length() % 2 else v // 2 for v in bell(seed, count)]
    return to_words(dtype, values, 1, [0] * count)


def singles(dtype: str, count: int, levels: int) -> bytes:
    """One weight for each of so many levels, the others dense only: costly to write."""
    words = []
    random, mantissa = numbers(1), plain.MANTISSA[dtype]
    one = plain.infinity(dtype) // 2 >> mantissa << mantissa
    for i in range(count):
        low = (next(random) << 32 | next(random)) % (1 << mantissa)
        word = one - (next(random) % 4 << mantissa) + low
        words.append(word >> 5 << 5 | (i if i <= levels else 0))
    return pack_words(dtype, words)


def sources() -> dict[str, tuple[bytes, int, str, str]]:
    """Case → ELSA file, block, requirements, description."""
    found: dict[str, tuple[bytes, int, str, str]] = {}
    entries = [
        Entry("f32", "F32", [24, 24], trained("F32", bell(1, 576), 2, [29, 58, 115])),
        Entry("bf16", "BF16", [25, 40], trained("BF16", bell(2, 1000), 2, [50, 100, 200])),
        floats("bias", [i / 16 - 0.5 for i in range(24)]),
    ]
    raw = network(entries, 2, 3, ["f32", "bf16"])
    text = "weights frozen by magnitude, 95/90/80 %; blocks of 2^17"
    found["trained"] = raw, 17, "2 10 20 25 26 28 29 32 34 37 38", text

    entries = [
        weights("f32.a", "F32", [40], 2, 3, seed=1),
        weights("bf16.a", "BF16", [5, 9], 2, 3, seed=2),
        weights("f64", "F64", [70], 2, 3, seed=3),
        weights("f16", "F16", [70], 2, 3, seed=4),
        weights("bf16.b", "BF16", [25], 2, 3, seed=5),
        weights("f32.b", "F32", [30], 2, 3, seed=6),
    ]
    raw = network(entries, 2, 3, [entry.name for entry in entries])
    text = "every nested dtype; blocks of 64 that end where no tensor ends, sequences interleaved"
    found["dtypes"] = raw, 6, "15 16 17 20 29 30", text

    raw = network(streams(), 1, 1, [])
    text = "byte streams of every type; a code that would be deeper than 12 bits; nothing nested"
    found["streams"] = raw, 18, "19 33 34 35 36 37 38 39", text

    raw = network([Entry("w", "F16", [16, 16], pattern())], 2, 2, ["w"])
    found["pattern"] = raw, 7, "25 26 28", "1:4 in 2:4, blocks of 128"

    values = [v if i % 9 else 0 for i, v in enumerate(bell(4, 300))]
    dense = Entry("w", "BF16", [300], trained("BF16", values, 1, [260]))
    few = [3 << 20 if i in (255, 766, 1400) else 0 for i in range(1500)]
    sparse = Entry("x", "F16", [1500], trained("F16", few, 1, [3]))
    half = Entry("y", "F32", [48], to_words("F32", bell(6, 48), 1, [0, 1] * 24))
    raw = network([dense, sparse, half], 1, 1, ["w", "x", "y"])
    text = "T = 1: most weights kept, every other, and three of 1500 with gaps above 255; zeros"
    found["gaps"] = raw, 18, "24 25 26 28 31", text

    random = numbers(77)
    bits = [
        Entry(
            f"{dtype} bits",
            dtype,
            [66],
            bytes(next(random) % 256 for _ in range(66 * plain.WIDTH[dtype] // 8)),
        )
        for dtype in ("F64", "F32", "F16", "BF16")
    ]
    special = Entry(
        "limits",
        "F32",
        [7],
        pack_words("F32", [0x7F800000, 0xFFC00000, 0, 1 << 31, 1, 0x807FFFFF, 0x7F7FFFFF]),
    )
    raw = network([*bits, special, weights("w", "F32", [4], 2, 2)], 2, 2, ["w"])
    text = "random bits, Inf, NaN, -0 and denormals in shared tensors, blocks of 64"
    found["shared_bits"] = raw, 6, "14 19 29 31 32", text

    entries = [
        Entry("63 would change h", "BF16", [68], uneven("BF16", 28, 68)),
        Entry("65 would change h", "F16", [68], uneven("F16", 44, 68)),
    ]
    text = "h chosen by one bit; a distance that does not occur counts for its length all the same"
    found["close"] = network(entries, 1, 1, []), 18, "32", text

    entries = [
        Entry("stored", "F32", [33], singles("F32", 33, 5)),
        Entry("not stored", "F64", [46], singles("F64", 46, 5)),
    ]
    raw = network(entries, 5, 30, ["stored", "not stored"])
    text = "a block that is one byte too long, and stored for that; another that is just not"
    found["stored"] = raw, 6, "22 23", text

    entries = [Entry("w", "BF16", [40], pack_words("BF16", make_words("BF16", 40, 7, 2, 3)))]
    raw = network(entries, 7, 2, ["w"])
    text = "tau = 7 in BF16: no mantissa is left, h is 0 or 255"
    found["tau_all"] = raw, 6, "29 30 32", text

    raw = elsa_file([], describe([], 1, ["a"], [], digests=False))
    found["no_tensors"] = raw, 18, "15 16 40", "no tensor at all: parts of 0 bytes"

    return found


# --- Vectors -------------------------------------------------------------------------------------


def add(
    out: Collection,
    case: str,
    raw: bytes,
    requirements: str,
    description: str,
    *,
    source: str | None = None,
    writer: bool = True,
    some: Sequence[int] = (),
) -> None:
    """A valid delivery file; `some` limits the levels whose digests are listed."""
    opened = delivery.validate(raw)
    whole = opened.whole()
    elsa = plain.validate(whole)
    start = len(raw) - sum(opened.document["parts"])
    if writer:
        made = plain.read_container(ship(whole, opened.document["block"]))
        if not made.rest.endswith(opened.data[opened.ends[0] :]):
            raise ValueError(f"{case} is not what a Writer makes")
    levels = list(some) or range(1, elsa.levels + 1)
    out.add(
        f"valid/delivery/{case}.ship.safetensors",
        raw,
        kind="delivery",
        verdict="valid",
        block=opened.document["block"],
        levels=elsa.levels,
        # Where the header, the head and the parts end: what is there of any prefix.
        ends=[start, *(start + end for end in opened.ends)],
        # The bytes of the parts are those that every Writer makes.
        writer=True if writer else None,
        source=source if source in out.files else None,
        whole=hashlib.sha256(whole).hexdigest(),
        digests=None if "shard" in elsa.profile else digests(opened, levels),
        requirements=ids(requirements),
        description=description,
    )


def digests(opened: delivery.Delivery, levels: Iterable[int]) -> dict[str, str]:
    """The digests of levels, by level number."""
    decoded = opened.decode(opened.levels)
    return {str(t): plain.level_digest(opened.extract(decoded, t)) for t in levels}


def ship(source: bytes, block: int = 17) -> bytes:
    """As a Writer would, but with a head that does not depend on a zlib."""
    return delivery.ship(source, block, fixed)


OF_VECTORS = {
    "per_level": (6, "3 4 6 14 16 24", "per-level tensors: a variant in each part"),
    "shapes": (18, "16 17", "scalars, empty tensors, odd sizes"),
    "special_values": (6, "29 31 32", "+0, -0, denormals and the largest values"),
    "shared_dtypes": (6, "16 19 32", "a plain sequence of every dtype of whole bytes"),
    "sub_byte": (18, "16 19", "dtypes below a byte: the bytes are the words"),
    "loose": (18, "4 11", "a source that breaks every rule for Writers comes back as it was"),
    "levels_255": (18, "8 13 20 22 23", "T = 255: 257 parts, and a stored block"),
    "unicode_names": (18, "4", "a source with Unicode names"),
    "version_1_7": (18, "4", "a source of a later minor version"),
}
# As in collection.EXTENDED: made by --extended only, for the tests.
EXTENDED = "unicode_names version_1_7 tau_2 tau_3 tau_4 tau_5 tau_6 tau_7"


def add_cases(out: Collection) -> None:
    """All valid delivery files."""
    text = "the file printed in the spec"
    raw = delivery.ship(delivery_example.source(), compress=delivery.stored_zlib)
    add(out, "example", raw, "1 2 3 7 8 9 10 11 12 15 20 25 26 29 30 31 40", text)
    for case, (block, requirements, text) in OF_VECTORS.items():
        source = f"valid/{case}.safetensors"
        if case not in EXTENDED.split() or out.extended:
            some = (1, 2, 127, 254, 255) if case == "levels_255" else ()
            raw = ship(out.files[source], block)
            add(out, case, raw, requirements, text, source=source, some=some)
    for tau in range(1, 9):
        if f"tau_{tau}" not in EXTENDED.split() or out.extended:
            source = f"valid/tau_{tau}.safetensors"
            raw = ship(out.files[source])
            add(out, f"tau_{tau}", raw, "20 29 30 32", f"tau = {tau}", source=source)
    for case, (made, block, requirements, text) in sources().items():
        add(out, case, ship(made, block), requirements, text)
    add_freedoms(out)
    add_shards(out)


def values(
    words: Sequence[int],
    dtype: str,
    tau: int,
    h: int,
    *,
    above: int = 0,
    escaped: Sequence[int] = (),
    stream: Callable[[bytes], bytes] = delivery.write_stream,
) -> bytes:
    """Values with any h, a `top` above the largest magnitude, and escapes that need not be."""
    s = plain.MANTISSA[dtype] - h
    top, distances = delivery.distances(words, dtype, s)
    moved = bytes(255 if i in escaped or d == 255 else d + above for i, d in enumerate(distances))
    escapes = pack_words(dtype, [v for v, d in zip(words, moved, strict=True) if d == 255])
    rests = []
    for word, d in zip(words, moved, strict=True):
        rest = word >> (plain.WIDTH[dtype] - 1) << (s - tau) | word % (1 << s) >> tau
        # What stands in the rest of an escape is without meaning.
        rests.append(rest ^ 1 if d == 255 else rest)
    coded = delivery.varint(top + above) + stream(moved)
    return bytes([h]) + coded + escapes + delivery.write_rest(rests, s - tau + 1)


def raw_stream(data: bytes) -> bytes:
    """A byte stream of type 0, whatever would be better."""
    return b"\0" + data


def wide_stream(data: bytes) -> bytes:
    """A byte stream of type 2 whose code has codewords for symbols that do not occur."""
    lengths = delivery.code_lengths(Counter(data + b"\0\1\xfe\xff"))
    return b"\2" + delivery.write_huffman(data, lengths)


def add_freedoms(out: Collection) -> None:
    """What a Writer would not do and a Reader has to accept."""
    counters = [[0, 1, 2, 0, 0, 1, 0, 2], [0, 2, 0, 0], [2, 1, 1, 2], [0, 0, 0, 2, 1], [0, 2, 1, 0]]
    words = make_words("BF16", 4 * 64 + 10, 2, 0, 31)
    words = [
        word & ~3 | counters[i // 64][i % len(counters[i // 64])] for i, word in enumerate(words)
    ]
    blocks = [words[at : at + 64] for at in range(0, len(words), 64)]
    draft = Draft(network([Entry("w", "BF16", [266], pack_words("BF16", words))], 2, 2, ["w"]))
    parts = draft.payloads

    def split(block: int, c: int) -> tuple[list[bool], list[int]]:
        """Which of the words that are left in a block have the counter, and these."""
        earlier = range(1, c or 3)
        left = [word for word in blocks[block] if plain.counter(word, 2) not in earlier]
        taken = [plain.counter(word, 2) == c for word in left]
        return taken, [word for word, flag in zip(left, taken, strict=True) if flag]

    def put(
        block: int, c: int, mode: int, stream: Callable[[bytes], bytes] = raw_stream, **how: Any
    ) -> None:
        """Write a payload in this way."""
        taken, chosen = split(block, c)
        positions = b""
        if mode in (1, 2):
            gaps = delivery.write_gaps([flag == (mode == 1) for flag in taken])
            positions = delivery.varint(len(gaps)) + stream(gaps)
        elif mode == 3:
            positions = plain.pack_bits(taken)
        h = how.pop("h")
        coded = delivery.write_values(chosen, "BF16", 2, 255)
        if h != 255:
            coded = values(chosen, "BF16", 2, h, stream=stream, **how)
        parts[c - 1][block] = delivery.varint(len(chosen)) + bytes([mode]) + positions + coded

    for block in (0, 1):  # no word of the second has the counter 1
        for part in parts:
            part[block] = b""
        parts[0][block] = delivery.store_block(blocks[block], "BF16", 2)
    put(2, 1, 3, h=0)
    put(2, 2, 0, h=1, above=3)
    put(3, 1, 1, wide_stream, h=2, escaped=(0, 5))
    put(3, 2, 2, h=3)
    put(3, 0, 3, wide_stream, h=4)
    put(4, 1, 3, wide_stream, h=5)
    put(4, 2, 1, h=255)
    put(4, 0, 0, wide_stream, h=0, escaped=(1,), above=2)
    text = "what no Writer does: stored without need, other modes, h, types, codes and escapes"
    raw = draft.build()
    add(out, "choices", raw, "3 22 25 26 27 28 29 30 31 32 33 34 35", text, writer=False)

    draft = Draft(delivery_example.source(), 20)
    draft.document |= {"version": "1.9", "requires": [], "x": [None, {"parts": -1.5}]}
    draft.metadata = {"elsa": "no profile", "format": "pt"}
    draft.compress = fixed
    text = "unknown keys, other metadata, a later minor version, no padding; a compressed head"
    add(out, "document", draft.build(), "2 3 7 8 12 R32 R45 R47", text)


def add_shards(out: Collection) -> None:
    """A network in two delivery files with an index."""
    shards = make_shards()
    folder = "valid/delivery/sharded"
    names = {}
    for number, shard in enumerate(shards, 1):
        name = shard_name(number)
        names[name] = name.replace(".safetensors", ".ship.safetensors")
        case = PurePosixPath("sharded") / name.removesuffix(".safetensors")
        add(out, str(case), ship(elsa_file(*shard)), "42", "a shard")
    index = make_index(shards)
    index["weight_map"] = {key: names[name] for key, name in index["weight_map"].items()}
    parts = [plain.validate(elsa_file(*shard)) for shard in shards]
    out.add(
        f"{folder}/model.ship.safetensors.index.json",
        dump_sorted(index).encode(),
        kind="delivery_index",
        verdict="valid",
        levels=2,
        digests={str(t): digest for t, digest in enumerate(plain.check_digests(parts), 1)},
        requirements=ids("42 R74 R76"),
        description="a network in two delivery files",
    )
