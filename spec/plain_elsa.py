"""A second implementation of the specification, in plain Python integers.

It is slow and holds whole files in memory. It exists so that the vectors, and the text they come
from, are checked by something that shares no code with elsa_format. Section numbers refer to
elsa-1.0.md. Needs the standard library and xxhash.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import xxhash

# Bits per element (§3.3).
WIDTH = {
    **dict.fromkeys(["F4"], 4),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"], 8),
    **dict.fromkeys(["F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
}
# Stored mantissa bits of the dtypes that may be nested (§4.1).
MANTISSA = {"BF16": 7, "F16": 10, "F32": 23, "F64": 52}

MAX_HEADER = 100_000_000
MAX_DEPTH = 32
RESERVED = "__elsa__."


class Bad(Exception):
    """A defect, by its name in the error registry (§11)."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(f"{error}: {message}")
        self.error = error


# --- Counters (§4) -------------------------------------------------------------------------------


def sign_bit(dtype: str) -> int:
    """The word that has only the sign bit."""
    return 1 << (WIDTH[dtype] - 1)


def infinity(dtype: str) -> int:
    """The bit pattern of +Inf: every exponent bit, no mantissa bit."""
    return sign_bit(dtype) - (1 << MANTISSA[dtype])


def counter(word: int, tau: int) -> int:
    """The counter a weight carries (§4.2)."""
    return word & ((1 << tau) - 1)


def keep(word: int, tau: int, level: int) -> int:
    """The weight at a level: its bits, or +0 (§4.2)."""
    return word if 0 < counter(word, tau) <= level else 0


def embed(word: int, c: int, dtype: str, tau: int, rounding: str) -> int:
    """The word that carries counter c in place of `word` (§4.3)."""
    if not 1 <= tau <= min(8, MANTISSA[dtype]):
        raise Bad("BitsTooWide", f"{tau} bits in {dtype}")
    sign = word & sign_bit(dtype)
    m = word - sign
    if m >= infinity(dtype):
        raise Bad("NonFinite", f"{word:x}")
    if m == 0 and c > 0:
        raise Bad("ZeroFrozen", f"{word:x} with counter {c}")
    if not 0 <= c < 1 << tau:
        raise Bad("CounterOutOfRange", f"{c} in {tau} bits")
    low = counter(m, tau)
    q = m - low + c
    if rounding == "nearest":
        d = c - low
        half = 1 << (tau - 1)
        step = 1 << tau
        if d >= half and q >= step:
            q -= step
        elif d < -half and q + step < infinity(dtype):
            q += step
    return sign | q


# --- Restricted JSON (§3.2) ----------------------------------------------------------------------

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class Json:
    """A recursive-descent parser that accepts restricted JSON and nothing else."""

    def __init__(self, text: str, *, header: bool) -> None:
        self.text = text
        self.header = header
        self.at = 0

    def document(self) -> dict[str, Any]:
        """The one object that the text consists of."""
        self.space()
        value = self.value(1)
        self.space()
        if self.at != len(self.text):
            raise self.bad("text after the document")
        if not isinstance(value, dict):
            raise self.bad("the document is not an object")
        return value

    def bad(self, message: str) -> Bad:
        return Bad("InvalidJson", f"{message} at character {self.at}")

    def space(self) -> None:
        while self.text[self.at : self.at + 1] in (" ", "\t", "\n", "\r"):
            self.at += 1

    def take(self, token: str) -> bool:
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def value(self, depth: int) -> Any:
        if self.text.startswith(("{", "["), self.at) and depth > MAX_DEPTH:
            raise self.bad(f"nested deeper than {MAX_DEPTH}")
        if self.take("{"):
            return self.object(depth)
        if self.take("["):
            return self.array(depth)
        if self.take('"'):
            return self.string()
        for token, constant in (("true", True), ("false", False), ("null", None)):
            if self.take(token):
                return constant
        return self.number()

    def object(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        self.space()
        if self.take("}"):
            return found
        while True:
            self.space()
            if not self.take('"'):
                raise self.bad("expected a key")
            key = self.string()
            if key in found:
                raise Bad("DuplicateKey", key)
            self.space()
            if not self.take(":"):
                raise self.bad("expected ':'")
            self.space()
            found[key] = self.value(depth + 1)
            self.space()
            if self.take("}"):
                return found
            if not self.take(","):
                raise self.bad("expected ',' or '}'")

    def array(self, depth: int) -> list[Any]:
        found: list[Any] = []
        self.space()
        if self.take("]"):
            return found
        while True:
            self.space()
            found.append(self.value(depth + 1))
            self.space()
            if self.take("]"):
                return found
            if not self.take(","):
                raise self.bad("expected ',' or ']'")

    def string(self) -> str:
        units: list[str] = []
        while not self.take('"'):
            c = self.text[self.at : self.at + 1]
            if c < " ":  # also the empty string at the end of the text
                raise self.bad("control character or end of text in a string")
            self.at += 1
            units.append(self.escape() if c == "\\" else c)
        # Two escapes may form one surrogate pair; what stays alone cannot be encoded.
        try:
            return "".join(units).encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        except UnicodeDecodeError:
            raise self.bad("lone surrogate") from None

    def escape(self) -> str:
        c = self.text[self.at : self.at + 1]
        self.at += 1
        if c in _ESCAPES:
            return _ESCAPES[c]
        digits = self.text[self.at : self.at + 4]
        if c != "u" or not re.fullmatch("[0-9a-fA-F]{4}", digits):
            raise self.bad("bad escape")
        self.at += 4
        return chr(int(digits, 16))

    def number(self) -> int | float:
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            raise self.bad("expected a value")
        digits, fraction, exponent = match.group(0), match.group(2), match.group(3)
        integer = fraction is None and exponent is None
        if self.header:
            if not integer or digits.startswith("-"):
                raise self.bad(f"{digits[:24]} is not an unsigned integer")
            if len(digits) > 19 or int(digits) >= 2**63:
                raise self.bad(f"{digits[:24]} is above 2^63-1")
        elif integer:
            if len(digits) > 17 or abs(int(digits)) >= 2**53:
                raise self.bad(f"{digits[:24]} is above 2^53-1")
        elif not math.isfinite(float(digits)):
            raise self.bad(f"{digits[:24]} is not finite")
        self.at = match.end()
        return int(digits) if integer else float(digits)


def parse_document(text: str) -> dict[str, Any]:
    """A profile, a level file's description or a shard index."""
    return Json(text, header=False).document()


# --- Written JSON (§3.5) -------------------------------------------------------------------------

_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def write_string(text: str) -> str:
    """A string as a Writer has to write it."""
    escaped = (_SHORT.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in text)
    return f'"{"".join(escaped)}"'


def write_number(value: int | float) -> str:
    """A number as a Writer has to write it."""
    if isinstance(value, int) or (value.is_integer() and abs(value) < 2**53):
        return str(int(value))
    # repr gives the fewest digits that round to the value; only their arrangement is Python's own.
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = whole + fraction
    point -= len(digits) - len(digits.lstrip("0"))
    digits = digits.strip("0")
    sign = "-" if value < 0 else ""
    if not 1e-6 <= abs(value) < 2**53:
        rest = f".{digits[1:]}" if digits[1:] else ""
        return f"{sign}{digits[0]}{rest}e{point - 1:+d}"
    if point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    return f"{sign}{digits[:point]}.{digits[point:]}"


def write_json(value: Any, *, sort: bool = True) -> str:
    """A document as a Writer has to write it; in the header, tensors stay in their order."""
    if isinstance(value, dict):
        keys = sorted(value, key=str.encode) if sort else value
        pairs = (f"{write_string(key)}:{write_json(value[key], sort=sort)}" for key in keys)
        return f"{{{','.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{','.join(write_json(item, sort=sort) for item in value)}]"
    if isinstance(value, str):
        return write_string(value)
    for constant, text in ((None, "null"), (True, "true"), (False, "false")):
        if value is constant:
            return text
    return write_number(value)


# --- Container (§3) ------------------------------------------------------------------------------


@dataclass
class Tensor:
    """One entry of the header."""

    dtype: str
    shape: list[int]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass
class Container:
    """A safetensors file in memory."""

    header: bytes
    metadata: dict[str, str]
    tensors: dict[str, Tensor]
    rest: bytes
    """All bytes after the header."""

    def stored(self, name: str) -> bytes:
        """The stored bytes of a tensor."""
        return self.rest[self.tensors[name].begin : self.tensors[name].end]

    def words(self, name: str) -> list[int]:
        """The elements of a tensor as unsigned integers."""
        size = WIDTH[self.tensors[name].dtype] // 8
        data = self.stored(name)
        return [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]

    def check_size(self) -> None:
        """Whether the file ends where the data section ends (§3.4)."""
        size = max((tensor.end for tensor in self.tensors.values()), default=0)
        if len(self.rest) < size:
            raise Bad("Truncated", f"{len(self.rest)} of {size} bytes of data")
        if len(self.rest) > size:
            raise Bad("TrailingData", f"{len(self.rest) - size} bytes after the data")


def read_container(raw: bytes) -> Container:
    """Parse everything up to the data section."""
    if len(raw) < 8:
        raise Bad("Truncated", "no header length")
    length = int.from_bytes(raw[:8], "little")
    if length > MAX_HEADER:
        raise Bad("HeaderTooLarge", str(length))
    header, rest = raw[8 : 8 + length], raw[8 + length :]
    if len(header) < length:
        raise Bad("Truncated", f"{len(header)} of {length} bytes of header")
    if not header.startswith(b"{") or not header.rstrip(b" ").endswith(b"}"):
        raise Bad("InvalidJson", "the header is not '{' … '}' and spaces")
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError:
        raise Bad("InvalidJson", "the header is not UTF-8") from None
    document = Json(text, header=True).document()
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Bad("InvalidHeader", "__metadata__")
    for name, entry in document.items():
        check_entry(name, entry)
    tensors = {
        name: Tensor(entry["dtype"], entry["shape"], *entry["data_offsets"])
        for name, entry in document.items()
    }
    check_offsets(tensors)
    return Container(header, metadata, tensors, rest)


def is_integer(value: Any) -> bool:
    """Whether a parsed value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a parsed value is a number; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_entry(name: str, entry: Any) -> None:
    """Structure of one tensor's entry (§3.3)."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Bad("InvalidHeader", name)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(is_integer(n) for n in shape):
        raise Bad("InvalidHeader", f"{name}: shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_integer, offsets)):
        raise Bad("InvalidHeader", f"{name}: data_offsets")
    if not isinstance(entry["dtype"], str):
        raise Bad("InvalidHeader", f"{name}: dtype")
    if entry["dtype"] not in WIDTH:
        raise Bad("UnknownDtype", f"{name}: {entry['dtype']}")


def check_offsets(tensors: Mapping[str, Tensor]) -> None:
    """Sizes fit shapes, and the data section has neither holes nor overlaps (§3.4)."""
    for name, tensor in tensors.items():
        width = WIDTH[tensor.dtype]
        if math.prod(n for n in tensor.shape if n > 0) * width >= 2**63:
            raise Bad("InvalidOffsets", f"{name}: shape overflows")
        if (tensor.end - tensor.begin) * 8 != tensor.elements * width:
            raise Bad("InvalidOffsets", f"{name}: size")
    position = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.begin != position:
            raise Bad("InvalidOffsets", f"{tensor.begin}, expected {position}")
        position = tensor.end


# --- Profile (§5) --------------------------------------------------------------------------------


def variant(name: str, level: int) -> str:
    """The stored name of a per-level tensor at a level (§6)."""
    return f"{RESERVED}{level}.{name}"


def checksum(data: bytes) -> str:
    """The checksum of some bytes (§8)."""
    return f"xxh3:{xxhash.xxh3_64_intdigest(data, seed=0):016x}"


def header_checksum(header: bytes, stated: str) -> str:
    """The checksum of the header with its own digits taken as zeros (§8.2)."""
    digits, position = stated.removeprefix("xxh3:").encode(), 0
    while (position := header.find(digits, position)) >= 0:
        header = header[:position] + b"0" * 16 + header[position + 16 :]
        position += 16
    return checksum(header)


def check_versions(document: Mapping[str, Any], error: str) -> None:
    """Version and required features come before everything else in the document (§5.1)."""
    version = document.get("version")
    if not isinstance(version, str) or not re.fullmatch(r"[0-9]+\.[0-9]+", version):
        raise Bad(error, "version")
    if version.split(".")[0] != "1":
        raise Bad("UnsupportedVersion", version)
    requires = document.get("requires", [])
    if not isinstance(requires, list) or not all(isinstance(item, str) for item in requires):
        raise Bad(error, "requires")
    if requires:
        raise Bad("UnsupportedFeature", requires[0])


def check_profile(document: Mapping[str, Any]) -> None:
    """The document by itself, field by field (§5.2)."""

    def need(condition: bool, field: str) -> None:
        if not condition:
            raise Bad("InvalidProfile", field)

    def matches(pattern: str, value: Any) -> bool:
        return isinstance(value, str) and re.fullmatch(pattern, value) is not None

    def measured(entry: Mapping[str, Any]) -> bool:
        metrics, errors = entry.get("metrics", {}), entry.get("errors", {})
        return (
            isinstance(metrics, dict)
            and isinstance(errors, dict)
            and all(map(is_number, metrics.values()))
            and all(is_number(error) and error >= 0 for error in errors.values())
            and errors.keys() <= metrics.keys()
        )

    bits, levels = document.get("bits"), document.get("levels")
    need(is_integer(bits) and 1 <= document["bits"] <= 8, "bits")
    need(isinstance(levels, list), "levels")
    need(1 <= len(document["levels"]) < 1 << document["bits"], "levels")
    for level in document["levels"]:
        need(isinstance(level, dict), "levels")
        need(isinstance(level.get("name"), str) and level["name"] != "", "name")
        need(is_integer(level.get("nonzero")) and level["nonzero"] >= 0, "nonzero")
        target = level.get("target", 0)
        need(is_number(target) and 0 <= target <= 1, "target")
        need(matches("[1-9][0-9]*:[1-9][0-9]*", level.get("pattern", "1:1")), "pattern")
        n, m = level.get("pattern", "1:1").split(":")
        need((len(n), n) <= (len(m), m), "pattern")  # digits without zeros before them
        need("digest" not in level or matches("sha256:[0-9a-f]{64}", level["digest"]), "digest")
        need(measured(level), "metrics")
    dense = document.get("dense", {})
    need(isinstance(dense, dict) and measured(dense), "dense")
    about = document.get("metrics", {})
    need(isinstance(about, dict), "metrics")
    for metric in about.values():
        need(isinstance(metric, dict), "metrics")
        need(metric.get("better") in ("higher", "lower"), "better")
        need(is_integer(metric.get("samples", 0)) and metric.get("samples", 0) >= 0, "samples")
        need(isinstance(metric.get("recorded", ""), str), "recorded")
    nested = document.get("nested")
    need(isinstance(nested, dict), "nested")
    for name, counts in document["nested"].items():
        need(not name.startswith(RESERVED), "nested: reserved name")
        need(isinstance(counts, list) and len(counts) == len(document["levels"]), "nested: counts")
        need(all(is_integer(n) and n >= 0 for n in counts), "nested: counts")
        need(all(a <= b for a, b in pairwise(counts)), "nested: decreasing")
    per_level = document.get("per_level", [])
    need(isinstance(per_level, list), "per_level")
    need(all(isinstance(name, str) for name in per_level), "per_level")
    need(not any(name.startswith(RESERVED) for name in per_level), "per_level: reserved name")
    encoded = [name.encode() for name in per_level]
    need(all(a < b for a, b in pairwise(encoded)), "per_level: order")
    need(not set(per_level) & set(document["nested"]), "both nested and per-level")
    checksums = document.get("checksums", {})
    need(isinstance(checksums, dict), "checksums")
    need(all(matches("xxh3:[0-9a-f]{16}", v) for v in checksums.values()), "checksums")
    if "shard" in document:
        shard = document["shard"]
        need(isinstance(shard, dict), "shard")
        need(is_integer(shard.get("number")) and is_integer(shard.get("of")), "shard")
        need(1 <= shard["number"] <= shard["of"], "shard")


def check_against_tensors(profile: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """The document against the tensors that the header declares (§5.3)."""

    def need(condition: bool, name: str) -> None:
        if not condition:
            raise Bad("ProfileMismatch", name)

    number_of_levels = len(profile["levels"])
    for name, counts in profile["nested"].items():
        need(name in tensors, name)
        need(tensors[name].dtype in MANTISSA, name)
        need(profile["bits"] <= MANTISSA[tensors[name].dtype], name)
        need(counts[-1] <= tensors[name].elements, name)
    variants = set()
    for name in profile.get("per_level", []):
        need(name in tensors, name)
        for t in range(1, number_of_levels + 1):
            need(variant(name, t) in tensors, variant(name, t))
            ours, plain = tensors[variant(name, t)], tensors[name]
            need((ours.dtype, ours.shape) == (plain.dtype, plain.shape), variant(name, t))
            variants.add(variant(name, t))
    for name in profile.get("checksums", {}):
        need(name in tensors, name)
    for name in tensors:
        need(not name.startswith(RESERVED) or name in variants, name)
    ends = [tensors[name].end for name in variants if tensors[name].elements]
    for name, tensor in tensors.items():
        if name not in variants and tensor.elements:
            need(tensor.begin >= max(ends, default=0), f"{name} is stored before a variant")
    for t, level in enumerate(profile["levels"]):
        kept = sum(counts[t] for counts in profile["nested"].values())
        if kept > level["nonzero"] or (kept < level["nonzero"] and "shard" not in profile):
            raise Bad("CountMismatch", f"level {t + 1}: {level['nonzero']} is not {kept}")


@dataclass
class Elsa:
    """An opened ELSA file."""

    container: Container
    profile: dict[str, Any]

    @property
    def levels(self) -> int:
        """T, the number of levels."""
        return len(self.profile["levels"])


def open_header(raw: bytes) -> Elsa:
    """What a Reader checks in the header, in the order of §11.2."""
    container = read_container(raw)
    if "elsa" not in container.metadata:
        raise Bad("NotElsa", "no profile")
    profile = parse_document(container.metadata["elsa"])
    check_versions(profile, "InvalidProfile")
    if "header" in profile:
        found = profile["header"]
        if not isinstance(found, str) or not re.fullmatch("xxh3:[0-9a-f]{16}", found):
            raise Bad("InvalidProfile", "header")
        if header_checksum(container.header, found) != found:
            raise Bad("ChecksumMismatch", "header")
    check_profile(profile)
    check_against_tensors(profile, container.tensors)
    return Elsa(container, profile)


def open_elsa(raw: bytes) -> Elsa:
    """All that a Reader checks before it reads data."""
    elsa = open_header(raw)
    elsa.container.check_size()
    return elsa


# --- Levels and digests (§4.2, §6, §7) -----------------------------------------------------------


@dataclass
class LevelTensor:
    """A tensor of an extracted level."""

    dtype: str
    shape: list[int]
    data: bytes
    nested: bool


def pack_bits(flags: list[bool]) -> bytes:
    """Bit i of the list is bit i mod 8 of byte i div 8; unused bits are zero."""
    packed = bytearray((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        if flag:
            packed[i // 8] |= 1 << (i % 8)
    return bytes(packed)


def extract(elsa: Elsa, level: int) -> dict[str, LevelTensor]:
    """The tensors of a level, under their plain names."""
    found = {}
    for name, tensor in elsa.container.tensors.items():
        if name.startswith(RESERVED):
            continue
        nested = name in elsa.profile["nested"]
        per_level = name in elsa.profile.get("per_level", [])
        data = elsa.container.stored(variant(name, level) if per_level else name)
        if nested:
            size = WIDTH[tensor.dtype] // 8
            words = [keep(w, elsa.profile["bits"], level) for w in elsa.container.words(name)]
            data = b"".join(w.to_bytes(size, "little") for w in words)
        found[name] = LevelTensor(tensor.dtype, tensor.shape, data, nested)
    return found


def split_kept(tensor: LevelTensor) -> tuple[list[bool], bytes]:
    """Which weights of a nested tensor are kept, and their bytes in order."""
    size = WIDTH[tensor.dtype] // 8
    weights = [tensor.data[i : i + size] for i in range(0, len(tensor.data), size)]
    # A kept weight has a counter above 0 in its low bits, so its bytes are not all zero.
    return [any(weight) for weight in weights], b"".join(w for w in weights if any(w))


def level_digest(level: Mapping[str, LevelTensor]) -> str:
    """The identity of an extracted level (§7)."""
    lines = []
    for name in sorted(level, key=lambda name: name.encode()):
        tensor = level[name]
        contents = [tensor.data]
        if tensor.nested:
            flags, values = split_kept(tensor)
            contents = [pack_bits(flags), values]
        shape = json.dumps(tensor.shape, separators=(",", ":"))
        hashes = " ".join(hashlib.sha256(content).hexdigest() for content in contents)
        lines.append(f"{len(name.encode())}:{name} {tensor.dtype} {shape} {hashes}\n")
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def check_data(parts: list[Elsa]) -> None:
    """What a Validator checks in the data of a network (§8, §4.4), digests excepted."""
    for part in parts:
        for name, stated in part.profile.get("checksums", {}).items():
            if checksum(part.container.stored(name)) != stated:
                raise Bad("ChecksumMismatch", name)
    nested = [(part, name) for part in parts for name in part.profile["nested"]]
    for part, name in nested:
        dtype = part.container.tensors[name].dtype
        words = part.container.words(name)
        if any(counter(word, part.profile["bits"]) > part.levels for word in words):
            raise Bad("CounterOutOfRange", name)
        if any(word & (sign_bit(dtype) - 1) >= infinity(dtype) for word in words):
            raise Bad("NonFinite", name)
    for part, name in nested:
        counters = [counter(word, part.profile["bits"]) for word in part.container.words(name)]
        for t, count in enumerate(part.profile["nested"][name], 1):
            if sum(0 < c <= t for c in counters) != count:
                raise Bad("CountMismatch", f"{name} at level {t}")


def check_digests(parts: list[Elsa]) -> list[str]:
    """The digests of all levels of a network, checked against those the profile states."""
    digests = []
    for t, stated in enumerate(parts[0].profile["levels"], 1):
        level: dict[str, LevelTensor] = {}
        for part in parts:
            level |= extract(part, t)
        digests.append(level_digest(level))
        if stated.get("digest", digests[-1]) != digests[-1]:
            raise Bad("DigestMismatch", f"level {t}")
    return digests


def validate(raw: bytes) -> Elsa:
    """Everything a Validator checks in one ELSA file."""
    elsa = open_elsa(raw)
    check_data([elsa])
    if "shard" not in elsa.profile:
        check_digests([elsa])
    return elsa


# --- Level files (§9) ----------------------------------------------------------------------------


def matrix(shape: list[int]) -> tuple[int, int]:
    """Rows and columns of a tensor in the CSR layout."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


@dataclass
class LevelFile:
    """An opened level file, or a plain checkpoint, which has no document."""

    container: Container
    document: dict[str, Any] | None
    parts: dict[str, list[str]]
    """The stored parts of each sparse tensor."""

    @property
    def nested(self) -> dict[str, Any]:
        """The nested tensors, as far as the document lists them."""
        listed: dict[str, Any] = (self.document or {}).get("tensors", {})
        return listed

    @property
    def names(self) -> set[str]:
        """The tensors that it decodes to."""
        stored = {part for parts in self.parts.values() for part in parts}
        return set(self.container.tensors) - stored | set(self.parts)


def need_layout(condition: bool, message: str) -> None:
    """Refuse a level file that contradicts itself."""
    if not condition:
        raise Bad("InvalidLayout", message)


def open_level(raw: bytes) -> LevelFile:
    """All that a Reader checks in a level file before it reads data, in the order of §11.2."""
    need = need_layout
    container = read_container(raw)
    need("elsa" not in container.metadata, "an ELSA file")
    if "elsa_level" not in container.metadata:
        if any(name.startswith(RESERVED) for name in container.tensors):
            raise Bad("NotElsa", "a reserved name without a level document")
        container.check_size()
        return LevelFile(container, None, {})
    document = parse_document(container.metadata["elsa_level"])
    check_versions(document, "InvalidLayout")
    check_level_fields(document, need)
    need(document["layout"] == "dense" or "tensors" in document, "tensors")
    check_level_tensors(document, need)
    parts: dict[str, list[str]] = {}
    for name, entry in document.get("tensors", {}).items():
        if document["layout"] != "dense":
            need(name not in container.tensors, f"{name} is stored twice")
            parts[name] = check_parts(container, name, entry, document["layout"], need)
        else:
            need(name in container.tensors, f"{name} is missing")
            found = container.tensors[name]
            need([found.dtype, found.shape] == [entry["dtype"], entry["shape"]], name)
    known = {part for stored in parts.values() for part in stored}
    for name in container.tensors:
        need(not name.startswith(RESERVED) or name in known, f"{name} has no meaning")
    container.check_size()
    return LevelFile(container, document, parts)


def decode_level(file: LevelFile) -> dict[str, LevelTensor]:
    """The dense tensors of a level file, whatever its layout."""
    level = {}
    for name in file.names - set(file.parts):
        tensor, data = file.container.tensors[name], file.container.stored(name)
        level[name] = LevelTensor(tensor.dtype, tensor.shape, data, name in file.nested)
    for name, parts in file.parts.items():
        entry = file.nested[name]
        decode = decode_bitmask if len(parts) == 2 else decode_csr
        data = decode(file.container, parts, entry, need_layout)
        need_layout(all(file.container.words(parts[-1])), f"{name}: a kept word is zero")
        level[name] = LevelTensor(entry["dtype"], entry["shape"], data, True)
    return level


def check_level_digest(
    level: Mapping[str, LevelTensor], files: list[LevelFile], document: Mapping[str, Any] | None
) -> None:
    """The digest that a document states for the content of some files (§9.1)."""
    told = all(file.document is not None and "tensors" in file.document for file in files)
    if told and document and document.get("digest", "") not in ("", level_digest(level)):
        raise Bad("DigestMismatch", "level")


def load_level(raw: bytes) -> dict[str, LevelTensor]:
    """The dense tensors of a level file, whatever its layout, or of a plain checkpoint."""
    file = open_level(raw)
    level = decode_level(file)
    check_level_digest(level, [file], file.document)
    return level


Need = Callable[[bool, str], None]


def check_level_fields(document: Mapping[str, Any], need: Need) -> None:
    """What a level document says about the level (§9.1)."""
    need(document.get("layout") in ("dense", "bitmask", "csr"), "layout")
    need(is_integer(document.get("level")) and 1 <= document["level"] <= 255, "level")
    need(isinstance(document.get("name"), str) and document["name"] != "", "name")
    if "digest" in document:
        digest = document["digest"]
        need(isinstance(digest, str), "digest")
        need(re.fullmatch("sha256:[0-9a-f]{64}", digest) is not None, "digest")


def check_level_tensors(document: Mapping[str, Any], need: Need) -> None:
    """What a level document says about the nested tensors (§9.1)."""
    tensors = document.get("tensors", {})
    need(isinstance(tensors, dict), "tensors")
    for name, entry in tensors.items():
        need(not name.startswith(RESERVED), "tensors: reserved name")
        need(isinstance(entry, dict) and isinstance(entry.get("dtype"), str), f"{name}: dtype")
        need(entry["dtype"] in MANTISSA, f"{name}: dtype")
        shape = entry.get("shape")
        need(isinstance(shape, list), f"{name}: shape")
        need(all(is_integer(n) and n >= 0 for n in entry["shape"]), f"{name}: shape")
        size = math.prod(n for n in entry["shape"] if n > 0) * WIDTH[entry["dtype"]]
        need(size < 2**63, f"{name}: shape overflows")


def check_parts(
    container: Container, name: str, entry: Mapping[str, Any], layout: str, need: Need
) -> list[str]:
    """The stored parts of a sparse tensor have the right dtypes and shapes (§9.2, §9.3)."""

    def part(kind: str) -> Tensor:
        full = f"{RESERVED}{kind}.{name}"
        need(full in container.tensors, f"{full} is missing")
        need(len(container.tensors[full].shape) == 1, f"{full}: shape")
        return container.tensors[full]

    kinds = ["bitmask", "values"] if layout == "bitmask" else ["indptr", "indices", "values"]
    values = part("values")
    need(values.dtype == entry["dtype"], f"{name}: dtype of values")
    kept = values.shape[0]
    if layout == "bitmask":
        bitmask = part("bitmask")
        need(bitmask.dtype == "U8", f"{name}: dtype of bitmask")
        need(bitmask.shape == [(math.prod(entry["shape"]) + 7) // 8], f"{name}: bitmask length")
    else:
        rows, columns = matrix(entry["shape"])
        dtype = "I32" if max(kept, columns) < 2**31 else "I64"
        indptr, indices = part("indptr"), part("indices")
        need(indptr.dtype == indices.dtype == dtype, f"{name}: index dtype")
        need(indptr.shape == [rows + 1], f"{name}: indptr length")
        need(indices.shape == [kept], f"{name}: indices length")
    return [f"{RESERVED}{kind}.{name}" for kind in kinds]


def decode_bitmask(
    container: Container, parts: list[str], entry: Mapping[str, Any], need: Need
) -> bytes:
    """Dense bytes of a tensor in the bitmask layout (§9.2)."""
    bitmask, values = container.stored(parts[0]), container.words(parts[1])
    elements = math.prod(entry["shape"])
    flags = [bool(bitmask[i // 8] >> (i % 8) & 1) for i in range(8 * len(bitmask))]
    need(not any(flags[elements:]), "unused bits are set")
    need(sum(flags) == len(values), "popcount")
    rest = iter(values)
    words = [next(rest) if flag else 0 for flag in flags[:elements]]
    return b"".join(word.to_bytes(WIDTH[entry["dtype"]] // 8, "little") for word in words)


def decode_csr(
    container: Container, parts: list[str], entry: Mapping[str, Any], need: Need
) -> bytes:
    """Dense bytes of a tensor in the CSR layout (§9.3)."""

    def signed(name: str) -> list[int]:
        half = 1 << (WIDTH[container.tensors[name].dtype] - 1)
        return [word - 2 * half if word >= half else word for word in container.words(name)]

    indptr, indices, values = signed(parts[0]), signed(parts[1]), container.words(parts[2])
    rows, columns = matrix(entry["shape"])
    need(indptr[0] == 0 and indptr[-1] == len(values), "indptr ends")
    need(all(a <= b for a, b in pairwise(indptr)), "indptr decreases")
    words = [0] * (rows * columns)
    for row in range(rows):
        before = -1
        for k in range(indptr[row], indptr[row + 1]):
            need(before < indices[k] < columns, "indices")
            before = indices[k]
            words[row * columns + before] = values[k]
    return b"".join(word.to_bytes(WIDTH[entry["dtype"]] // 8, "little") for word in words)


# --- Shards (§10) --------------------------------------------------------------------------------


MAX_INDEX = 100_000_000


def read_index(path: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """The map and the metadata of an index whose shards are there (§10.1)."""
    raw = path.read_bytes()
    if len(raw) > MAX_INDEX:
        raise Bad("InvalidIndex", f"{len(raw)} bytes")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise Bad("InvalidJson", "the index is not UTF-8") from None
    document = parse_document(text)
    weight_map, metadata = document.get("weight_map"), document.get("metadata", {})
    if not isinstance(weight_map, dict) or not weight_map:
        raise Bad("InvalidIndex", "weight_map")
    if not all(isinstance(name, str) for name in weight_map.values()):
        raise Bad("InvalidIndex", "weight_map")
    if not isinstance(metadata, dict):
        raise Bad("InvalidIndex", "metadata")
    files = set(weight_map.values())
    for name in files:
        if name in ("", ".", "..") or any(c in name for c in "/\\\0"):
            raise Bad("UnsafePath", name)
    folders = {os.path.dirname(os.path.realpath(p)) for p in (path.parent / "x", path)}
    for name in files:
        if os.path.dirname(os.path.realpath(path.parent / name)) not in folders:
            raise Bad("UnsafePath", name)
    for name in files:
        if not os.path.isfile(path.parent / name):
            raise Bad("InvalidIndex", f"{name} is missing")
    return weight_map, metadata


def read_shards(path: Path, weight_map: Mapping[str, str]) -> dict[str, bytes]:
    """The shards by file name, in the order of the names."""
    names = sorted(set(weight_map.values()), key=str.encode)
    return {name: (path.parent / name).read_bytes() for name in names}


def check_map(weight_map: Mapping[str, str], containers: Mapping[str, Container]) -> None:
    """The map against what the shards hold."""
    for name, container in containers.items():
        listed = {tensor for tensor, shard in weight_map.items() if shard == name}
        if listed != set(container.tensors):
            raise Bad("InvalidIndex", f"tensors of {name}")


def check_total_size(metadata: Mapping[str, Any], containers: Mapping[str, Container]) -> None:
    """The total size, if the index gives one."""
    size = sum(t.end - t.begin for c in containers.values() for t in c.tensors.values())
    found = metadata.get("total_size", size)
    if not is_integer(found) or found != size:
        raise Bad("InvalidIndex", f"total_size {found}, expected {size}")


LEVEL_FIELDS: dict[str, Any] = {
    "name": None,
    "nonzero": None,
    "target": None,
    "pattern": None,
    "digest": None,
    "metrics": {},
    "errors": {},
}


def level_table(profile: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The levels as far as this version knows them, defaults filled in."""
    return [
        {key: level.get(key, default) for key, default in LEVEL_FIELDS.items()}
        for level in profile["levels"]
    ]


def open_index(path: Path, open_shard: Callable[[bytes], Elsa] = open_elsa) -> list[Elsa]:
    """The shards of a network, in the order of their numbers, checked against the index."""
    weight_map, metadata = read_index(path)
    parts = {name: open_shard(raw) for name, raw in read_shards(path, weight_map).items()}
    containers = {name: part.container for name, part in parts.items()}
    check_map(weight_map, containers)
    found = [part.profile.get("shard", {"number": 0, "of": 0}) for part in parts.values()]
    numbers = sorted((shard["number"], shard["of"]) for shard in found)
    if numbers != [(i, len(parts)) for i in range(1, len(parts) + 1)]:
        raise Bad("InvalidIndex", f"shard numbers {numbers}")
    ordered = sorted(parts.values(), key=lambda part: int(part.profile["shard"]["number"]))
    for part in ordered:
        if part.profile["bits"] != ordered[0].profile["bits"]:
            raise Bad("InvalidIndex", "bits differ between shards")
        if level_table(part.profile) != level_table(ordered[0].profile):
            raise Bad("InvalidIndex", "levels differ between shards")
    check_total_size(metadata, containers)
    for t, level in enumerate(ordered[0].profile["levels"]):
        kept = sum(counts[t] for part in ordered for counts in part.profile["nested"].values())
        if kept != level["nonzero"]:
            raise Bad("CountMismatch", f"level {t + 1}: {level['nonzero']} is not {kept}")
    return ordered


def joined_metadata(containers: list[Container]) -> dict[str, str]:
    """The metadata of a network in shards, its documents aside: the first to have a key has it."""
    joined: dict[str, str] = {}
    for container in containers:
        joined = container.metadata | joined
    documents = ("elsa", "elsa_level", "elsa_delivery")
    return {key: value for key, value in joined.items() if key not in documents}


def validate_index(path: Path) -> list[Elsa]:
    """Everything a Validator checks in a sharded network."""
    parts = open_index(path)
    check_data(parts)
    check_digests(parts)
    return parts


def open_level_index(path: Path) -> tuple[list[LevelFile], dict[str, Any] | None]:
    """The shards of a level or of a plain checkpoint, and what the index says of the whole."""
    weight_map, metadata = read_index(path)
    files = {name: open_level(raw) for name, raw in read_shards(path, weight_map).items()}
    containers = {name: file.container for name, file in files.items()}
    whole = metadata.get("elsa_level")
    documents = [file.document for file in files.values()]

    def need(condition: bool, message: str) -> None:
        if not condition:
            raise Bad("InvalidIndex", message)

    check_map(weight_map, containers)
    if "elsa_level" in metadata:
        need(isinstance(whole, dict), "elsa_level")
        check_versions(metadata["elsa_level"], "InvalidIndex")
        check_level_fields(metadata["elsa_level"], need)
    if whole is None and not any(documents):
        return list(files.values()), None
    need(all(documents), "a shard without a level document")
    first = whole or documents[0] or {}
    for document in documents:
        for key in ("level", "name", "layout"):
            need((document or {}).get(key) == first[key], f"{key} differs")
    names = [name for file in files.values() for name in file.names]
    need(len(names) == len(set(names)), "a tensor in two shards")
    check_total_size(metadata, containers)
    return list(files.values()), whole


def load_level_index(path: Path) -> dict[str, LevelTensor]:
    """The dense tensors of a level, or of a plain checkpoint, in shards."""
    files, whole = open_level_index(path)
    level: dict[str, LevelTensor] = {}
    for file in files:
        level |= decode_level(file)
    for file in files:
        own = {name: level[name] for name in file.names}
        check_level_digest(own, [file], file.document)
    check_level_digest(level, files, whole)
    return level
