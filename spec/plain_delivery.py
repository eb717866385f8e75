"""Delivery files in plain Python integers: a Writer, a Reader and a Validator.

It is slow and holds whole files in memory, like plain_elsa.py on which it stands: the two exist so
that the specifications are checked by something that shares no code with elsa_format. Section
numbers refer to delivery-1.0.md. Needs the standard library and xxhash.
"""

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from spec import plain_elsa
from spec.plain_elsa import MANTISSA, WIDTH, Bad, Container, Elsa, LevelTensor, Tensor

TENSOR = "__elsa__.delivery"
DOCUMENT = "elsa_delivery"
SIZE = 3  # bytes of a size in the index (§4.2)
CHECKSUM = 8  # bytes of the checksum before a payload
LONGEST = 12  # bits of the longest codeword (§8.2)
LENGTHS = [4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 3, 2, 1]  # the list of lengths at first (§8.3)
STORED = 4  # the mode of a stored block (§5)


def bad(message: str) -> Bad:
    """The error of this document."""
    return Bad("InvalidDelivery", message)


def word_bits(dtype: str) -> int:
    """W. Below 8 bits an element is no word: the tensor's bytes are the words (§2)."""
    return max(8, WIDTH[dtype])


def to_words(data: bytes, dtype: str) -> list[int]:
    """Stored bytes as words."""
    size = word_bits(dtype) // 8
    return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]


def to_bytes(words: Iterable[int], dtype: str) -> bytes:
    """Words as stored bytes."""
    size = word_bits(dtype) // 8
    return b"".join(word.to_bytes(size, "little") for word in words)


# --- The list of a directory (§9.1) --------------------------------------------------------------


def stays_inside(path: str) -> bool:
    """Whether a path stays in its directory (ELSA-D-046)."""
    parts = path.split("/")
    return (
        re.search(r"[\\:\x00-\x1f]", path) is None
        and not {"", ".", ".."} & set(parts)
        and not any(part.startswith(".") for part in parts[:-1])
        and path != "elsa-files.json"
    )


def read_listing(text: str) -> tuple[str, dict[str, tuple[int, str]]]:
    """The weights of a list, and the size and SHA-256 of every other file."""
    document = plain_elsa.parse_document(text)
    plain_elsa.check_versions(document, "InvalidIndex")
    weights, files = document.get("weights"), document.get("files")
    if not isinstance(weights, str) or not isinstance(files, dict):
        raise Bad("InvalidIndex", "weights or files")
    found: dict[str, tuple[int, str]] = {}
    for path, entry in files.items():
        known: dict[str, Any] = entry if isinstance(entry, dict) else {}
        size, digest = known.get("size", -1), known.get("sha256")
        if not plain_elsa.is_integer(size) or size < 0 or path == weights:
            raise Bad("InvalidIndex", path)
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            raise Bad("InvalidIndex", path)
        found[path] = (size, digest)
    if "/" in weights or not all(map(stays_inside, (weights, *found))):
        raise Bad("UnsafePath", "a file")
    return weights, found


# --- Numbers and bits (§5, §7, §8) ---------------------------------------------------------------


def varint(number: int) -> bytes:
    """Groups of 7 bits, the lowest first."""
    out = bytearray()
    while number >= 128:
        out.append(number % 128 + 128)
        number //= 128
    return bytes([*out, number])


def pack(fields: Iterable[tuple[int, int]]) -> bytes:
    """Numbers of so many bits each, from the least significant bit of the first byte on."""
    out, pending, bits = bytearray(), 0, 0
    for number, width in fields:
        pending |= number << bits
        bits += width
        while bits >= 8:
            out.append(pending % 256)
            pending //= 256
            bits -= 8
    return bytes([*out, pending]) if bits else bytes(out)


def unpack(data: bytes) -> list[int]:
    """The bits of bytes, the least significant of each first."""
    return [byte >> i & 1 for byte in data for i in range(8)]


class Fields:
    """A payload, field after field."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        """So many bytes."""
        if size > len(self.data) - self.at:
            raise bad(f"{size} bytes at byte {self.at} of {len(self.data)}")
        self.at += size
        return self.data[self.at - size : self.at]

    def byte(self) -> int:
        """One byte."""
        return self.take(1)[0]

    def varint(self) -> int:
        """An integer below 2^63, in no more bytes than it needs (ELSA-D-021)."""
        number = 0
        for i in range(9):
            byte = self.byte()
            number |= byte % 128 << 7 * i
            if byte < 128:
                if byte == 0 and i > 0:
                    raise bad("a varint with more bytes than it needs")
                return number
        raise bad("a varint of 2^63 or more")

    def end(self) -> None:
        """Nothing is left (ELSA-D-021)."""
        if self.at != len(self.data):
            raise bad(f"{len(self.data) - self.at} bytes behind the last field")


# --- Byte streams (§8) ---------------------------------------------------------------------------


def code_lengths(count: dict[int, int]) -> dict[int, int]:
    """The length of the codeword of each symbol that occurs, which are two or more (ELSA-D-037)."""
    while True:
        # A tree is its count and the depth of each symbol in it.
        leaves = [(n, {symbol: 0}) for n, symbol in sorted((n, s) for s, n in count.items())]
        nodes: list[tuple[int, dict[int, int]]] = []
        while len(leaves) + len(nodes) > 1:
            taken = []
            for _ in range(2):
                leaf_first = leaves and (not nodes or leaves[0][0] <= nodes[0][0])
                taken.append((leaves if leaf_first else nodes).pop(0))
            deeper = {s: depth + 1 for _, tree in taken for s, depth in tree.items()}
            nodes.append((taken[0][0] + taken[1][0], deeper))
        lengths = nodes[0][1]
        if max(lengths.values()) <= LONGEST:
            return lengths
        count = {symbol: (n + 1) // 2 for symbol, n in count.items()}


def codewords(lengths: dict[int, int]) -> dict[int, str]:
    """The codeword of each symbol, as its bits from the highest on (ELSA-D-036)."""
    code, before = -1, 0
    found = {}
    for length, symbol in sorted((length, symbol) for symbol, length in lengths.items()):
        code = (code + 1) << (length - before if before else 0)
        before = length
        found[symbol] = f"{code:0{length}b}"
    return found


def quarters(n: int) -> list[int]:
    """How many of n symbols each of the four bit streams has (ELSA-D-038)."""
    q = -(-n // 4)
    return [min(q, max(0, n - i * q)) for i in range(4)]


def lengths_fields(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Each as its place in the list, so many ones and a zero; then it moves to the front."""
    known, fields = list(LENGTHS), []
    for length in lengths:
        place = known.index(length)
        fields.append(((1 << place) - 1, place + 1))
        known.insert(0, known.pop(place))
    return fields


def write_lengths(lengths: Sequence[int]) -> bytes:
    """The lengths of symbols 0…last (ELSA-D-038)."""
    return pack(lengths_fields(lengths))


def read_lengths(fields: Fields, count: int) -> list[int]:
    """So many lengths (ELSA-D-038)."""
    known, place = list(LENGTHS), 0
    found: list[int] = []
    bits: list[int] = []
    while len(found) < count:
        bits = bits or unpack(fields.take(1))
        if bits.pop(0):
            place += 1
            if place == len(known):
                raise bad("a length that is not in the list")
        else:
            known.insert(0, known.pop(place))
            found.append(known[0])
            place = 0
    if any(bits):
        raise bad("unused bits of the lengths are set")
    return found


def write_huffman(data: bytes, lengths: dict[int, int] | None = None) -> bytes:
    """The stream as type 2, without the type, by default with the code of a Writer (§8.3)."""
    lengths = lengths or code_lengths(Counter(data))
    code = codewords(lengths)
    last = max(lengths)
    table = write_lengths([lengths.get(symbol, 0) for symbol in range(last + 1)])
    streams, at = [], 0
    for size in quarters(len(data)):
        bits = "".join(code[symbol] for symbol in data[at : at + size])
        streams.append(pack((int(bit), 1) for bit in bits))
        at += size
    sizes = [varint(len(stream)) for stream in streams]
    return b"".join([bytes([last]), table, *sizes, *streams])


def read_huffman(fields: Fields, n: int) -> bytes:
    """The n bytes of a stream of type 2, behind the type (§8.3)."""
    last = fields.byte()
    found = read_lengths(fields, last + 1)
    lengths = {symbol: length for symbol, length in enumerate(found) if length}
    if len(lengths) < 2 or max(lengths) != last:
        raise bad("fewer than two symbols, or another last one")
    if sum(1 << LONGEST - length for length in lengths.values()) != 1 << LONGEST:
        raise bad("the codewords do not fill the code")
    symbols = {code: symbol for symbol, code in codewords(lengths).items()}
    sizes = [fields.varint() for _ in range(4)]
    out = bytearray()
    for size, count in zip(sizes, quarters(n), strict=True):
        bits, at = unpack(fields.take(size)), 0
        for _ in range(count):
            code = ""
            while code not in symbols:
                if at == len(bits):
                    raise bad("a bit stream that is too short")
                code += str(bits[at])
                at += 1
            out.append(symbols[code])
        if len(bits) - at >= 8 or any(bits[at:]):
            raise bad("a bit stream that is too long, or unused bits that are set")
    return bytes(out)


def write_stream(data: bytes) -> bytes:
    """A byte stream, as a Writer chooses its type (ELSA-D-034)."""
    if len(set(data)) == 1:
        return bytes([1, data[0]])
    coded = write_huffman(data)
    return b"\2" + coded if len(coded) < len(data) else b"\0" + data


def read_stream(fields: Fields, n: int) -> bytes:
    """A byte stream of n bytes (ELSA-D-033)."""
    if n == 0:
        return b""
    kind = fields.byte()
    if kind == 0:
        return fields.take(n)
    if kind == 1:
        return fields.take(1) * n
    if kind == 2:
        return read_huffman(fields, n)
    raise bad(f"stream type {kind}")


# --- Positions (§6) ------------------------------------------------------------------------------


def write_gaps(marked: Sequence[bool]) -> bytes:
    """How far it is to each mark, in steps of at most 255 (ELSA-D-026)."""
    out, gap = bytearray(), 0
    for mark in marked:
        if mark:
            out += b"\xff" * (gap // 255) + bytes([gap % 255])
        gap = 0 if mark else gap + 1
    return bytes(out)


def read_gaps(gaps: bytes, r: int) -> list[bool]:
    """Which of r words are marked (ELSA-D-026)."""
    if gaps.endswith(b"\xff"):
        raise bad("gaps that end with 255")
    if sum(255 if gap == 255 else gap + 1 for gap in gaps) > r:
        raise bad(f"gaps beyond {r} words")
    marked: list[bool] = []
    for gap in gaps:
        marked += [False] * gap
        if gap < 255:
            marked.append(True)
    return marked + [False] * (r - len(marked))


def write_positions(taken: Sequence[bool]) -> bytes:
    """Which of the words that are left are taken, as a Writer chooses the mode (ELSA-D-028)."""
    k, r = sum(taken), len(taken)
    if k == r:
        return b"\0"
    mode = 1 if 2 * k <= r else 2
    gaps = write_gaps(taken if mode == 1 else [not flag for flag in taken])
    coded = varint(len(gaps)) + write_stream(gaps)
    if len(coded) > -(-r // 8):
        return b"\3" + plain_elsa.pack_bits(list(taken))
    return bytes([mode]) + coded


def read_positions(fields: Fields, k: int, r: int) -> list[bool]:
    """Which of the r words that are left are taken (ELSA-D-025 to ELSA-D-027)."""
    mode = fields.byte()
    if not 1 <= k <= r or (mode in (1, 2) and k == r):
        raise bad(f"{k} of {r} words in mode {mode}")
    if mode == 0:
        taken = [True] * r
    elif mode in (1, 2):
        g = fields.varint()
        if g > r:
            raise bad(f"{g} gaps in {r} words")
        marked = read_gaps(read_stream(fields, g), r)
        taken = [flag == (mode == 1) for flag in marked]
    elif mode == 3:
        flags = [bit == 1 for bit in unpack(fields.take(-(-r // 8)))]
        taken = flags[:r]
        if any(flags[r:]):
            raise bad("unused bits of the positions are set")
    else:
        raise bad(f"mode {mode}")
    if sum(taken) != k:
        raise bad(f"{sum(taken)} positions, expected {k}")
    return taken


# --- Values (§7) ---------------------------------------------------------------------------------


def write_rest(rests: Sequence[int], bits: int) -> bytes:
    """The rests of some words, of so many bits each (ELSA-D-030)."""
    planes, above = divmod(bits, 8)
    streams = [write_stream(bytes(r >> 8 * i & 255 for r in rests)) for i in range(planes)]
    return b"".join(streams) + pack((r >> 8 * planes, above) for r in rests)


def read_rest(fields: Fields, k: int, bits: int) -> list[int]:
    """The rests of k words, of so many bits each (ELSA-D-030)."""
    planes, above = divmod(bits, 8)
    rests = [0] * k
    for i in range(planes):
        stream = read_stream(fields, k)
        rests = [r | byte << 8 * i for r, byte in zip(rests, stream, strict=True)]
    packed = unpack(fields.take(-(-k * above // 8)))
    if any(packed[k * above :]):
        raise bad("unused bits of the rest are set")
    for i in range(k):
        for bit in range(above):
            rests[i] |= packed[i * above + bit] << (8 * planes + bit)
    return rests


def distances(words: Sequence[int], dtype: str, s: int) -> tuple[int, bytes]:
    """The largest magnitude, and how far each word is from it (ELSA-D-029)."""
    magnitudes = [(word & plain_elsa.sign_bit(dtype) - 1) >> s for word in words]
    top = max(magnitudes)
    return top, bytes(min(top - q, 255) for q in magnitudes)


def cost(words: Sequence[int], dtype: str, tau: int, h: int) -> int:
    """What the Writer expects an h to take, in bits (ELSA-D-032)."""
    k = len(words)
    if h == 255:
        return k * (WIDTH[dtype] - tau)
    s = MANTISSA[dtype] - h
    _, stream = distances(words, dtype, s)
    coded = 0
    if len(set(stream)) > 1:
        lengths = code_lengths(Counter(stream))
        table = [lengths.get(d, 0) for d in range(max(stream) + 1)]
        coded = sum(lengths[d] for d in stream) + sum(bits for _, bits in lengths_fields(table))
        coded = min(8 * k, coded + 64)
    return coded + k * (s - tau + 1) + stream.count(255) * WIDTH[dtype]


def write_values(words: Sequence[int], dtype: str, tau: int, h: int | None = None) -> bytes:
    """Words that have one counter, by default with the h that a Writer chooses (§7)."""
    if h is None:
        h = 255
        if dtype in MANTISSA:
            choices = [*range(min(5, MANTISSA[dtype] - tau) + 1), 255]
            h = min(choices, key=lambda h: cost(words, dtype, tau, h))  # the first of equals
    if h == 255:
        return b"\xff" + write_rest([word >> tau for word in words], word_bits(dtype) - tau)
    s = MANTISSA[dtype] - h
    top, stream = distances(words, dtype, s)
    escapes = to_bytes((v for v, d in zip(words, stream, strict=True) if d == 255), dtype)
    rests = []
    for word in words:
        sign = word >> (WIDTH[dtype] - 1)
        rests.append(sign << (s - tau) | (word & (1 << s) - 1) >> tau)
    fields = [bytes([h]), varint(top), write_stream(stream), escapes]
    return b"".join([*fields, write_rest(rests, s - tau + 1)])


def read_values(fields: Fields, k: int, dtype: str, tau: int, c: int) -> list[int]:
    """k words with the counter c (§7)."""
    width = word_bits(dtype)
    h = fields.byte()
    if h == 255:
        return [rest << tau | c for rest in read_rest(fields, k, width - tau)]
    if h > 5 or dtype not in MANTISSA or h > MANTISSA[dtype] - tau:
        raise bad(f"h = {h}")
    s = MANTISSA[dtype] - h
    top = fields.varint()
    if top >= 1 << (width - 1 - s):
        raise bad(f"top is {top}")
    stream = read_stream(fields, k)
    if any(top < d < 255 for d in stream):
        raise bad(f"a distance above {top}")
    escapes = to_words(fields.take(stream.count(255) * width // 8), dtype)
    if any(plain_elsa.counter(word, tau) != c for word in escapes):
        raise bad(f"an escape whose counter is not {c}")
    rests = read_rest(fields, k, s - tau + 1)
    words, escaped = [], iter(escapes)
    for d, rest in zip(stream, rests, strict=True):
        if d == 255:
            words.append(next(escaped))
        else:
            sign, low = divmod(rest, 1 << (s - tau))
            words.append(sign << (width - 1) | (top - d) << s | low << tau | c)
    return words


# --- Blocks (§5) ---------------------------------------------------------------------------------


def write_block(words: Sequence[int], dtype: str, tau: int, levels: int) -> list[bytes]:
    """The payloads of a nested block in parts 1…T and the dense part (ELSA-D-020)."""
    payloads, left = [], list(words)
    for c in [*range(1, levels + 1), 0]:
        taken = [plain_elsa.counter(word, tau) == c for word in left]
        chosen = [word for word, flag in zip(left, taken, strict=True) if flag]
        left = [word for word, flag in zip(left, taken, strict=True) if not flag]
        payload = b""
        if chosen:
            values = write_values(chosen, dtype, tau)
            payload = varint(len(chosen)) + write_positions(taken) + values
        payloads.append(payload)
    size = len(words) * WIDTH[dtype] // 8
    total = sum(len(payload) + CHECKSUM for payload in payloads if payload)
    if total > size + size // 1024 + 64:  # ELSA-D-023
        return [store_block(words, dtype, tau), *[b""] * levels]
    return payloads


def store_block(words: Sequence[int], dtype: str, tau: int) -> bytes:
    """The payload of a stored block in part 1 (ELSA-D-022)."""
    k = sum(plain_elsa.counter(word, tau) == 1 for word in words)
    return varint(k) + bytes([STORED]) + to_bytes(words, dtype)


Block = list[int | None]
"""The words of a nested block; None for those that are left."""


def read_block(payload: bytes, block: Block, dtype: str, tau: int, levels: int, c: int) -> None:
    """Put in the words with the counter c (ELSA-D-020 to ELSA-D-024)."""
    left = [i for i, word in enumerate(block) if word is None]
    if not payload:
        if c == 0 and left:
            raise bad(f"{len(left)} words are in no part")
        return
    fields = Fields(payload)
    k = fields.varint()
    if c == 1 and payload[fields.at :][:1] == bytes([STORED]):
        fields.take(1)
        words = to_words(fields.take(len(block) * WIDTH[dtype] // 8), dtype)
        counters = [plain_elsa.counter(word, tau) for word in words]
        if counters.count(1) != k or max(counters) > levels:
            raise bad("counters of a stored block")
        block[:] = words
    else:
        # A stored block has none left, so that no part can have more of it.
        if c == 0 and k != len(left):
            raise bad(f"{k} of the {len(left)} words that are left")
        taken = read_positions(fields, k, len(left))
        places = [i for i, flag in zip(left, taken, strict=True) if flag]
        for i, word in zip(places, read_values(fields, k, dtype, tau, c), strict=True):
            block[i] = word
    fields.end()


# --- Parts (§4) ----------------------------------------------------------------------------------


@dataclass
class Run:
    """A sequence: the words of tensors of one dtype (ELSA-D-016)."""

    dtype: str
    names: list[str]
    length: int
    """Number of words."""

    def blocks(self, size: int) -> list[int]:
        """The number of words in each block (ELSA-D-017)."""
        return [min(size, self.length - at) for at in range(0, self.length, size)]


def runs(tensors: dict[str, Tensor], names: Iterable[str]) -> list[Run]:
    """The sequences of tensors that are given in the order of their data."""
    found: dict[str, Run] = {}
    for name in names:
        tensor = tensors[name]
        if tensor.end > tensor.begin:
            run = found.setdefault(tensor.dtype, Run(tensor.dtype, [], 0))
            run.names.append(name)
            run.length += (tensor.end - tensor.begin) * 8 // word_bits(tensor.dtype)
    return list(found.values())


class Plan:
    """Which sequences are in which part of a network's delivery file (§4.2)."""

    def __init__(self, elsa: Elsa) -> None:
        tensors, levels = elsa.container.tensors, elsa.levels
        per_level = elsa.profile.get("per_level", [])
        order = sorted(tensors, key=lambda name: (tensors[name].begin, tensors[name].end))
        variants = [{plain_elsa.variant(name, t) for name in per_level} for t in range(levels + 1)]
        nested = elsa.profile["nested"]
        shared = set(tensors).difference(per_level, nested, *variants)
        self.order = order
        """All tensors, in the order of their data."""
        self.members = [variants[1] | shared, *variants[2:], set(per_level)]
        """The plain tensors of parts 1…T and the dense part (ELSA-D-014)."""
        self.plain = [runs(tensors, [n for n in order if n in names]) for names in self.members]
        """Their sequences."""
        self.nested = runs(tensors, [name for name in order if name in nested])
        """The sequences that every part has."""


def payload_checksum(payload: bytes, head: bytes) -> bytes:
    """The checksum of a payload; `head` is what the source's header is (ELSA-D-015)."""
    seed = xxhash.xxh3_64_intdigest(head)
    return xxhash.xxh3_64_intdigest(payload, seed=seed).to_bytes(8, "little")


def part_bytes(payloads: Sequence[bytes], head: bytes) -> bytes:
    """A part: the index, and the payloads (ELSA-D-015)."""
    index = b"".join(len(payload).to_bytes(SIZE, "little") for payload in payloads)
    return index + b"".join(payload_checksum(p, head) + p for p in payloads if p)


def split_part(data: bytes, sequences: Sequence[Run], block: int, head: bytes) -> list[bytes]:
    """The payloads of a part, their sizes and checksums checked (ELSA-D-015, ELSA-D-018)."""
    blocks = sum(-(-run.length // (1 << block)) for run in sequences)
    # Before anything is made for each block: a header may declare far more than there is.
    if blocks * SIZE > len(data):
        raise bad(f"an index of {blocks} blocks in a part of {len(data)} bytes")
    limits = []
    for run in sequences:
        for n in run.blocks(1 << block):
            limits.append(n * word_bits(run.dtype) // 8 + -(-n // 8) + 1024)
    sizes = [int.from_bytes(data[i * SIZE :][:SIZE], "little") for i in range(blocks)]
    if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
        raise bad("a payload is too long for its block")
    if blocks * SIZE + sum(size + CHECKSUM for size in sizes if size) != len(data):
        raise bad(f"an index and payloads that are not {len(data)} bytes")
    payloads, fields = [], Fields(data[blocks * SIZE :])
    for size in sizes:
        stated = fields.take(CHECKSUM) if size else b""
        payloads.append(fields.take(size))
        if size and payload_checksum(payloads[-1], head) != stated:
            raise Bad("ChecksumMismatch", "payload")
    return payloads


# --- Writer --------------------------------------------------------------------------------------


def write_parts(elsa: Elsa, block: int) -> list[list[bytes]]:
    """The payloads of parts 1…T and the dense part."""
    plan, tau, size = Plan(elsa), elsa.profile["bits"], 1 << block

    def chunks(run: Run) -> list[list[int]]:
        words = to_words(b"".join(map(elsa.container.stored, run.names)), run.dtype)
        return [words[at : at + size] for at in range(0, len(words), size)]

    parts = [
        [write_values(words, run.dtype, 0) for run in sequences for words in chunks(run)]
        for sequences in plan.plain
    ]
    for run in plan.nested:
        for words in chunks(run):
            written = write_block(words, run.dtype, tau, elsa.levels)
            for part, payload in zip(parts, written, strict=True):
                part.append(payload)
    return parts


def stored_zlib(data: bytes) -> bytes:
    """A zlib stream of stored blocks: larger, and the same with every zlib (ELSA-D-012)."""
    out = b"\x78\x01"
    pieces = [data[at : at + 65535] for at in range(0, len(data), 65535)]
    for i, piece in enumerate(pieces, 1):
        size = len(piece)
        out += bytes([i == len(pieces)]) + size.to_bytes(2, "little")
        out += (65535 - size).to_bytes(2, "little") + piece
    return out + zlib.adler32(data).to_bytes(4, "big")


def dump(value: Any) -> str:
    """JSON as ELSA-R-030 has it, keys in their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def write_file(document: dict[str, Any], data: bytes, *, pad: bool = True) -> bytes:
    """A delivery file of its document, without `header`, and its parts (§3)."""
    zeros = "xxh3:" + "0" * 16
    entry = {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}
    text = dump(dict(sorted((document | {"header": zeros}).items())))
    header = dump({"__metadata__": {DOCUMENT: text}, TENSOR: entry}).encode()
    if pad:
        header += b" " * (-(8 + len(header)) % 256)
    digits = xxhash.xxh3_64_hexdigest(header).encode()
    header = header.replace(zeros.encode(), b"xxh3:" + digits)
    return len(header).to_bytes(8, "little") + header + data


def deflate(data: bytes) -> bytes:
    """The smallest that zlib makes of the head."""
    return zlib.compress(data, 9)


def ship(source: bytes, block: int = 17, compress: Callable[[bytes], bytes] = deflate) -> bytes:
    """The delivery file of an ELSA file."""
    elsa = plain_elsa.validate(source)
    start = 8 + len(elsa.container.header)
    head = compress(source[:start])
    parts = [head, *(part_bytes(p, source[:start]) for p in write_parts(elsa, block))]
    document = {
        "version": "1.0",
        "block": block,
        "parts": [len(part) for part in parts],
        "source": start,
        "head": "xxh3:" + xxhash.xxh3_64_hexdigest(head),
    }
    return write_file(document, b"".join(parts))


# --- Reader --------------------------------------------------------------------------------------


def check_document(document: dict[str, Any], container: Container) -> None:
    """The delivery document, in the order of §10, and the one tensor (§3)."""

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise bad(message)

    def checksum(field: str) -> str:
        found = document.get(field)
        need(isinstance(found, str) and bool(re.fullmatch("xxh3:[0-9a-f]{16}", found)), field)
        return document[field][5:]  # type: ignore[no-any-return]

    plain_elsa.check_versions(document, "InvalidDelivery")
    digits = checksum("header")
    if plain_elsa.header_checksum(container.header, digits) != f"xxh3:{digits}":
        raise Bad("ChecksumMismatch", "header")
    checksum("head")
    for field, low, high in (("block", 6, 20), ("source", 10, 100_000_008)):
        found = document.get(field)
        need(plain_elsa.is_integer(found) and low <= document[field] <= high, field)
    parts = document.get("parts")
    need(isinstance(parts, list) and 3 <= len(document["parts"]) <= 257, "parts")
    need(all(plain_elsa.is_integer(n) and n >= 0 for n in document["parts"]), "parts")
    need(list(container.tensors) == [TENSOR], "tensors")
    tensor = container.tensors[TENSOR]
    need(tensor.dtype == "U8" and len(tensor.shape) == 1, TENSOR)
    need(sum(document["parts"]) == tensor.end, "parts are not the tensor's bytes")


def inflate(head: bytes, size: int) -> bytes:
    """The head decompressed, which MUST give so many bytes and end there (ELSA-D-011)."""
    stream = zlib.decompressobj()
    try:
        # One byte more than allowed is enough to know.
        data = stream.decompress(head, size + 1)
    except zlib.error as error:
        raise bad(f"head: {error}") from None
    if len(data) != size or not stream.eof or stream.unused_data:
        raise bad(f"the head is not a zlib stream of {size} bytes")
    if int.from_bytes(data[:8], "little") != size - 8:
        raise bad(f"the head's header length is not {size - 8}")
    return data


LevelTensors = dict[str, tuple[str, list[int], bytes]]


class Delivery:
    """A delivery file, or the first bytes of one."""

    def __init__(self, raw: bytes) -> None:
        """Check the two headers, lines 1 to 8 of §10."""
        container = plain_elsa.read_container(raw)
        if DOCUMENT not in container.metadata:
            raise Bad("NotElsa", "no delivery document")
        self.document = plain_elsa.parse_document(container.metadata[DOCUMENT])
        check_document(self.document, container)
        parts, there = self.document["parts"], len(container.rest)
        if there > sum(parts):
            raise Bad("TrailingData", f"{there - sum(parts)} bytes after the parts")
        if there < parts[0]:
            raise Bad("Incomplete", f"{there} of {parts[0]} bytes of the head")
        self.data = container.rest
        self.ends = [sum(parts[: i + 1]) for i in range(len(parts))]
        """Where the head and the parts end in the data section."""
        self.parts_there = sum(end <= there for end in self.ends) - 1
        """How many of parts 1…T and the dense part are complete: the levels there, at most T."""
        if plain_elsa.checksum(self.part(0)) != self.document["head"]:
            raise Bad("ChecksumMismatch", "head")
        self.head = inflate(self.part(0), self.document["source"])
        self.source = plain_elsa.open_header(self.head)
        self.levels = self.source.levels
        if len(parts) != self.levels + 2:
            raise bad(f"{len(parts)} parts of {self.levels} levels")
        self.plan = Plan(self.source)

    def payloads(self, t: int) -> list[bytes]:
        """Those of part t, or for t = T + 1 of the dense part."""
        sequences = [*self.plan.plain[t - 1], *self.plan.nested]
        return split_part(self.part(t), sequences, self.document["block"], self.head)

    def decode(self, count: int) -> dict[str, bytes]:
        """The stored bytes of all tensors as the first parts have them; zeros for what is left."""
        if count > self.parts_there:
            raise Bad("Incomplete", f"{self.parts_there} parts of the {count} that are needed")
        found = dict.fromkeys(self.plan.order, b"")
        if count == 0:
            return found
        plan, size = self.plan, 1 << self.document["block"]
        parts = [self.payloads(t) for t in range(1, count + 1)]
        nested: list[list[Block]] = [[[None] * n for n in run.blocks(size)] for run in plan.nested]
        for t, part in enumerate(parts, 1):
            payloads = iter(part)
            for run in plan.plain[t - 1]:
                words = []
                for n in run.blocks(size):
                    fields = Fields(next(payloads))
                    words += read_values(fields, n, run.dtype, 0, 0)
                    fields.end()
                found |= self.cut(run, words)
            c = t if t <= self.levels else 0
            for run, blocks in zip(plan.nested, nested, strict=True):
                for block in blocks:
                    tau = self.source.profile["bits"]
                    read_block(next(payloads), block, run.dtype, tau, self.levels, c)
        for run, blocks in zip(plan.nested, nested, strict=True):
            found |= self.cut(run, [word or 0 for block in blocks for word in block])
        return found

    def part(self, t: int) -> bytes:
        """The bytes of part t; 0 is the head, T + 1 the dense part."""
        return self.data[self.ends[t] - self.document["parts"][t] : self.ends[t]]

    def cut(self, run: Run, words: Sequence[int]) -> dict[str, bytes]:
        """The tensors of a sequence."""
        tensors, at, found = self.source.container.tensors, 0, {}
        data = to_bytes(words, run.dtype)
        for name in run.names:
            size = tensors[name].end - tensors[name].begin
            found[name] = data[at : at + size]
            at += size
        return found

    def extract(self, decoded: dict[str, bytes], t: int) -> dict[str, LevelTensor]:
        """The tensors of a level that has been decoded (ELSA §4.2, §6)."""
        profile, found = self.source.profile, {}
        for name, tensor in self.source.container.tensors.items():
            if name.startswith(plain_elsa.RESERVED):
                continue
            nested = name in profile["nested"]
            per_level = name in profile.get("per_level", [])
            data = decoded[plain_elsa.variant(name, t) if per_level else name]
            if nested:
                words = to_words(data, tensor.dtype)
                kept = (plain_elsa.keep(word, profile["bits"], t) for word in words)
                data = to_bytes(kept, tensor.dtype)
            found[name] = LevelTensor(tensor.dtype, tensor.shape, data, nested)
        return found

    def level(self, t: int) -> LevelTensors:
        """The tensors of level t: dtype, shape and bytes."""
        if not 1 <= t <= self.levels:
            raise ValueError(f"level {t} of {self.levels}")
        level = self.extract(self.decode(t), t)
        return {name: (tensor.dtype, tensor.shape, tensor.data) for name, tensor in level.items()}

    def whole(self) -> bytes:
        """The source, byte for byte (ELSA-D-004)."""
        decoded = self.decode(self.levels + 1)
        return self.head + b"".join(decoded[name] for name in self.plan.order)


# --- Validator -----------------------------------------------------------------------------------


Check = Callable[[Delivery, dict[str, bytes]], None]
"""A check of the tensors that were decoded of a file."""


def check_checksums(delivery: Delivery, decoded: dict[str, bytes]) -> None:
    """The checksums of tensors that are complete (ELSA §8.1)."""
    profile, there = delivery.source.profile, delivery.parts_there
    complete = set().union(*delivery.plan.members[:there])
    if there > delivery.levels:
        complete |= set(profile["nested"])
    for name, stated in profile.get("checksums", {}).items():
        if name in complete and "xxh3:" + xxhash.xxh3_64_hexdigest(decoded[name]) != stated:
            raise Bad("ChecksumMismatch", name)


def check_finite(delivery: Delivery, decoded: dict[str, bytes]) -> None:
    """No word is Inf or NaN (ELSA §4.4)."""
    for name in delivery.source.profile["nested"]:
        dtype = delivery.source.container.tensors[name].dtype
        sign, infinity = plain_elsa.sign_bit(dtype), plain_elsa.infinity(dtype)
        if any(word & sign - 1 >= infinity for word in to_words(decoded[name], dtype)):
            raise Bad("NonFinite", name)


def check_counts(delivery: Delivery, decoded: dict[str, bytes]) -> None:
    """The counts of the levels that are there (ELSA §4.4)."""
    profile, tensors = delivery.source.profile, delivery.source.container.tensors
    for name, counts in profile["nested"].items():
        words = to_words(decoded[name], tensors[name].dtype)
        counters = [plain_elsa.counter(word, profile["bits"]) for word in words]
        for t, count in enumerate(counts[: delivery.parts_there], 1):
            if sum(0 < c <= t for c in counters) != count:
                raise Bad("CountMismatch", f"{name} at level {t}")


def check_tensors(deliveries: Sequence[Delivery], decoded: Sequence[dict[str, bytes]]) -> None:
    """Line 11 of §10 but for digests: each check over all files before the next."""
    checks: list[Check] = [check_checksums, check_finite, check_counts]
    for check in checks:
        for delivery, data in zip(deliveries, decoded, strict=True):
            check(delivery, data)


def check_digests(deliveries: Sequence[Delivery], decoded: Sequence[dict[str, bytes]]) -> None:
    """The digests of the levels that are there in every file of a network (ELSA §7)."""
    there = min(delivery.parts_there for delivery in deliveries)
    for t, stated in enumerate(deliveries[0].source.profile["levels"][:there], 1):
        level: dict[str, LevelTensor] = {}
        for delivery, data in zip(deliveries, decoded, strict=True):
            level |= delivery.extract(data, t)
        if "digest" in stated and plain_elsa.level_digest(level) != stated["digest"]:
            raise Bad("DigestMismatch", f"level {t}")


def validate(raw: bytes) -> Delivery:
    """Everything a Validator checks in a file or prefix."""
    delivery = Delivery(raw)
    decoded = delivery.decode(delivery.parts_there)
    check_tensors([delivery], [decoded])
    if "shard" not in delivery.source.profile:
        check_digests([delivery], [decoded])
    return delivery


# --- Shards (§9) ---------------------------------------------------------------------------------


def open_index(path: Path) -> list[Delivery]:
    """The delivery files of a network's shards, in the order of their numbers (ELSA-D-042)."""
    opened = []

    def open_shard(raw: bytes) -> Elsa:
        try:
            opened.append(Delivery(raw))
        except Bad as error:
            if error.error == "NotElsa" and DOCUMENT not in plain_elsa.read_container(raw).metadata:
                raise Bad("InvalidIndex", "a shard is not a delivery file") from None
            raise
        return opened[-1].source

    ordered = plain_elsa.open_index(path, open_shard)
    return [delivery for source in ordered for delivery in opened if delivery.source is source]


def validate_index(path: Path) -> list[Delivery]:
    """Everything a Validator checks in a network of several delivery files."""
    deliveries = open_index(path)
    decoded = [delivery.decode(delivery.parts_there) for delivery in deliveries]
    check_tensors(deliveries, decoded)
    check_digests(deliveries, decoded)
    return deliveries
