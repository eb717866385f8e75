"""Build small files byte by byte: headers, profiles, weights."""

import copy
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from spec import plain_elsa as plain

ZEROS = "xxh3:" + "0" * 16
ALIGNMENT = 256

Profile = dict[str, Any]


@dataclass
class Entry:
    """A tensor to be stored."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes


def dump(value: Any) -> str:
    """Compact JSON with keys in their order, and numbers as they are given: 2.0 is not 2."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def dump_sorted(value: Any) -> str:
    """Compact JSON with sorted keys, and numbers as they are given."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def frame(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of a header and data, with the true header length or another one."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def place(entries: Sequence[Entry]) -> dict[str, Any]:
    """The header entries of tensors that are stored one after the other."""
    document, position = {}, 0
    for entry in entries:
        end = position + len(entry.data)
        document[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": [position, end],
        }
        position = end
    return document


def container(entries: Sequence[Entry], metadata: dict[str, str], room: int = 0) -> bytes:
    """A safetensors file with the tensors in the given order, its header padded to some size."""
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    header = plain.write_json(document | place(entries), sort=False).encode()
    return frame(header.ljust(room), b"".join(entry.data for entry in entries))


def padded(entries: Sequence[Entry], metadata: dict[str, str]) -> int:
    """The smallest N that holds the header and has its data at a multiple of 256."""
    size = int.from_bytes(container(entries, metadata)[:8], "little")
    return size + -(8 + size) % ALIGNMENT


def sign_header(raw: bytes) -> bytes:
    """Put the header checksum in place of its zeros (§8.2)."""
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length]
    digits = xxhash.xxh3_64_hexdigest(header)
    return raw[:8] + header.replace(ZEROS.encode(), b"xxh3:" + digits.encode()) + raw[8 + length :]


def written_elsa_file(
    entries: Sequence[Entry], profile: Profile, metadata: dict[str, str] | None = None
) -> bytes:
    """The ELSA file that every Writer has to make of this (§3.5)."""
    longest = copy.deepcopy(profile)
    sizes = {entry.name: math.prod(entry.shape) for entry in entries}
    most = sum(sizes[name] for name in profile["nested"])
    for level in longest["levels"]:
        level["nonzero"] = 2**53 - 1 if "shard" in profile else most
    for name, counts in longest["nested"].items():
        longest["nested"][name] = [sizes[name]] * len(counts)
    texts = [{**(metadata or {}), "elsa": plain.write_json(p)} for p in (longest, profile)]
    return sign_header(container(entries, texts[1], padded(entries, texts[0])))


def elsa_file(
    entries: Sequence[Entry],
    profile: Profile | str,
    metadata: dict[str, str] | None = None,
) -> bytes:
    """An ELSA file with the given profile, or text in place of one."""
    text = profile if isinstance(profile, str) else dump_sorted(profile)
    return sign_header(container(entries, {**(metadata or {}), "elsa": text}))


def arrange(entries: Sequence[Entry]) -> list[Entry]:
    """The order of §3.5: variants first, then by falling width."""
    return sorted(
        entries,
        key=lambda entry: (not entry.name.startswith(plain.RESERVED), -plain.WIDTH[entry.dtype]),
    )


def as_elsa(entries: Sequence[Entry], profile: Profile) -> plain.Elsa:
    """The entries as the second implementation sees them."""
    tensors = {
        name: plain.Tensor(entry["dtype"], entry["shape"], *entry["data_offsets"])
        for name, entry in place(entries).items()
    }
    data = b"".join(entry.data for entry in entries)
    return plain.Elsa(plain.Container(b"", {}, tensors, data), profile)


def describe(
    entries: Sequence[Entry],
    bits: int,
    names: Sequence[str],
    nested: Sequence[str],
    per_level: Sequence[str] = (),
    *,
    digests: bool = True,
    checksums: bool = True,
    header: bool = True,
) -> Profile:
    """The profile of these tensors."""
    profile: Profile = {"version": "1.0", "bits": bits, "nested": {}}
    profile["levels"] = [{"name": name, "nonzero": 0} for name in names]
    elsa = as_elsa(entries, profile)
    for name in nested:
        counters = [plain.counter(word, bits) for word in elsa.container.words(name)]
        counts = [sum(0 < c <= t for c in counters) for t in range(1, len(names) + 1)]
        profile["nested"][name] = counts
        for level, count in zip(profile["levels"], counts, strict=True):
            level["nonzero"] += count
    if per_level:
        profile["per_level"] = sorted(per_level, key=str.encode)
    if digests:
        for t, level in enumerate(profile["levels"], 1):
            level["digest"] = plain.level_digest(plain.extract(elsa, t))
    if checksums:
        profile["checksums"] = {entry.name: plain.checksum(entry.data) for entry in entries}
    if header:
        profile["header"] = ZEROS
    return profile


# --- Weights -------------------------------------------------------------------------------------


def pack_words(dtype: str, words: Sequence[int]) -> bytes:
    """Words as stored bytes."""
    return b"".join(word.to_bytes(plain.WIDTH[dtype] // 8, "little") for word in words)


def numbers(seed: int) -> Iterator[int]:
    """Pseudo-random 32-bit integers that no library can change: a linear congruential generator."""
    state = seed
    while True:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        yield state >> 32


def make_words(dtype: str, count: int, tau: int, levels: int, seed: int) -> list[int]:
    """Weights between 2^-8 and 2 in magnitude, about half of them frozen."""
    random = numbers(seed)
    one = plain.infinity(dtype) // 2 // (1 << plain.MANTISSA[dtype]) << plain.MANTISSA[dtype]
    words = []
    for _ in range(count):
        exponent = next(random) % 8
        mantissa = (next(random) << 32 | next(random)) % (1 << plain.MANTISSA[dtype])
        sign = plain.sign_bit(dtype) if next(random) % 2 else 0
        word = sign | one - (exponent << plain.MANTISSA[dtype]) + mantissa
        c = next(random) % (2 * levels + 1)
        words.append(plain.embed(word, c if c <= levels else 0, dtype, tau, "nearest"))
    return words


def weights(name: str, dtype: str, shape: list[int], tau: int, levels: int, seed: int = 1) -> Entry:
    """A nested tensor with pseudo-random weights and counters."""
    count = 1
    for n in shape:
        count *= n
    return Entry(name, dtype, shape, pack_words(dtype, make_words(dtype, count, tau, levels, seed)))


def floats(name: str, values: Sequence[float], shape: list[int] | None = None) -> Entry:
    """An F32 tensor of the given values."""
    data = struct.pack(f"<{len(values)}f", *values)
    return Entry(name, "F32", [len(values)] if shape is None else shape, data)


def embedded(name: str, shape: list[int], tau: int, pairs: Sequence[tuple[float, int]]) -> Entry:
    """An F32 tensor of weights with their counters."""
    words = []
    for value, c in pairs:
        (word,) = struct.unpack("<I", struct.pack("<f", value))
        words.append(plain.embed(word, c, "F32", tau, "nearest"))
    return Entry(name, "F32", shape, pack_words("F32", words))
