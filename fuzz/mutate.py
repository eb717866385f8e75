"""Mutations that know what a safetensors header and an ELSA profile look like.

Random bytes rarely get past the header; a file whose JSON is changed in one place, and whose
checksums are then made right again, reaches the code behind it.
"""

import json
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import xxhash

MAX_SIZE = 1 << 16
DOCUMENTS = ("elsa", "elsa_level")
_ZEROS = "xxh3:" + "0" * 16


class Pairs(list[Any]):
    """A JSON object as pairs, so that a key can be there twice."""


class Literal(str):
    """Text that goes into the JSON as it is."""


NUMBERS: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, 8, 9, 31, 32, 64, 65, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32, 2**40),
    *(2**53 - 1, 2**53, 2**58, 2**60, 2**63 - 1, 2**63, 2**64, 10**30, -1, -(2**63), 0.5, 1e308),
    *map(Literal, ("-0", "0.0", "1e0", "1e999", "01", "+1", "NaN", "Infinity", "1" * 400, "0x1")),
)
STRINGS = (
    *("", "a", "w", "__metadata__", "__elsa__.1.w", "__elsa__.values.w", "1.0", "2.0", "elsa"),
    *("F32", "BF16", "F16", "F64", "F4", "F6_E2M3", "U8", "BOOL", "I64", "C64", "F8_E8M0"),
    *("dense", "bitmask", "csr", "2:4", "xxh3:" + "0" * 16, "sha256:" + "0" * 64, "\x1b[2J"),
    *("\ufeff", "é", "𝄞", "\x00", "../x", "n" * 300),
)
LITERALS = tuple(map(Literal, ('"\\ud800"', '"\\u0061"', '"\\q"', "'a'", "tru", "", "[", "}")))


def mutate(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """A changed copy of a file, mostly with its structure intact."""
    if rng.random() < 0.25:
        return _bytes(data, rng, others)[:MAX_SIZE]
    try:
        changed = _document(data, rng) if data.startswith(b"{") else _structure(data, rng)
    except RecursionError:  # some versions of Python parse deeper trees than they walk
        changed = None
    if changed is None or rng.random() < 0.1:
        changed = _bytes(changed or data, rng, others)
    return changed[:MAX_SIZE]


def _bytes(data: bytes, rng: random.Random, others: Sequence[bytes]) -> bytes:
    raw = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(raw) + 1)
        kind = rng.randrange(7)
        if kind == 0 and at < len(raw):
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and at < len(raw):
            raw[at] = rng.randrange(256)
        elif kind == 2:
            del raw[at : at + rng.choice((1, 2, 8, 100))]
        elif kind == 3:
            raw[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
        elif kind == 4:
            end = rng.randrange(at, min(len(raw), at + 64) + 1)
            raw[at:at] = raw[at:end]
        elif kind == 5 and others:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            raw[at : at + rng.randrange(64)] = other[start : start + rng.randrange(256)]
        elif kind == 6 and len(raw) >= 8:
            raw[:8] = struct.pack("<Q", rng.choice((0, 1, 2, len(raw), 10**8, 10**8 + 1, 2**63)))
        raw = raw or bytearray(1)
    return bytes(raw)


def _document(data: bytes, rng: random.Random) -> bytes | None:
    """A file that is nothing but JSON: a shard index."""
    try:
        tree = json.loads(data, object_pairs_hook=Pairs)
    except ValueError:
        return None
    for _ in range(rng.choice((1, 1, 2))):
        _change_tree(tree, rng)
    return dump(tree).encode("utf-8", "surrogatepass")


def _structure(data: bytes, rng: random.Random) -> bytes | None:
    header, body = split(data)
    try:
        tree = json.loads(header, object_pairs_hook=Pairs)
        metadata = next((v for k, v in tree if k == "__metadata__"), None)
        documents = {
            key: json.loads(value, object_pairs_hook=Pairs)
            for key, value in (metadata if isinstance(metadata, Pairs) else ())
            if key in DOCUMENTS
        }
    except (ValueError, TypeError):
        return None
    changed = bytearray(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(10)
        if place < 5 and documents:
            _change_tree(rng.choice(list(documents.values())), rng)
        elif place < 7:
            _change_tree(tree, rng)
        elif place < 9 and changed:
            _change_data(changed, rng)
        else:
            _add_tensor(tree, changed, rng)
    text = assemble(tree, documents, bytes(changed), checksums=rng.random() < 0.7)
    raw = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        raw += rng.choice((b" ", b"\n", b"\0", b"}"))
    raw = sign(raw) if rng.random() < 0.9 else raw
    return struct.pack("<Q", len(raw)) + raw + bytes(changed)


def split(data: bytes) -> tuple[bytes, bytes]:
    """Header and data section, as far as they are there."""
    length = min(int.from_bytes(data[:8], "little"), len(data))
    return data[8 : 8 + length], data[8 + length :]


def assemble(tree: Any, documents: dict[str, Any], data: bytes, *, checksums: bool) -> str:
    """The header's text, its documents put back, tensor checksums made right if asked."""
    entries = tree if isinstance(tree, Pairs) else Pairs()
    if checksums:
        _correct_checksums(entries, documents, data)
    for key, value in entries:
        if key == "__metadata__" and isinstance(value, Pairs):
            value[:] = [(k, dump(documents[k]) if k in documents else v) for k, v in value]
    return dump(tree)


def _correct_checksums(entries: Pairs, documents: dict[str, Any], data: bytes) -> None:
    profile = documents.get("elsa")
    places = {}
    for name, entry in entries:
        pair = dict(entry).get("data_offsets") if _is_object(entry) else None
        if isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair):
            places[name] = pair
    for at, (key, value) in enumerate(profile if isinstance(profile, Pairs) else ()):
        if key == "checksums" and isinstance(value, Pairs):
            value[:] = [(n, _checksum(data, *places[n]) if n in places else c) for n, c in value]
        elif key == "header":
            profile[at] = (key, _ZEROS)  # type: ignore[index]


def _is_object(node: Any) -> bool:
    return isinstance(node, Pairs) and all(isinstance(k, str) for k, _ in node)


def _checksum(data: bytes, start: int, stop: int) -> str:
    return f"xxh3:{xxhash.xxh3_64_hexdigest(data[max(start, 0) : max(stop, 0)])}"


def sign(header: bytes) -> bytes:
    """Put the header's checksum in the place of its zeros."""
    digits = xxhash.xxh3_64_hexdigest(header)
    return header.replace(_ZEROS.encode(), b"xxh3:" + digits.encode())


def dump(node: Any) -> str:
    """JSON of a tree that may break every rule of JSON."""
    if isinstance(node, Literal):
        return str(node)
    if isinstance(node, Pairs):
        return "{" + ",".join(f"{dump(k)}:{dump(v)}" for k, v in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return json.dumps(node, ensure_ascii=False)


def _containers(tree: Any) -> Iterator[list[Any]]:
    if isinstance(tree, list):
        yield tree
        for child in tree:
            yield from _containers(child[1] if isinstance(tree, Pairs) else child)


def _change_tree(tree: Any, rng: random.Random) -> None:
    nodes = list(_containers(tree))
    if not nodes:
        return
    node = rng.choice(nodes)
    if not node:
        node.append(("x", 1) if isinstance(node, Pairs) else rng.choice(NUMBERS))
        return
    at = rng.randrange(len(node))
    if not isinstance(node, Pairs):
        _change_list(node, at, rng, nodes)
        return
    key, value = node[at]
    kind = rng.randrange(8)
    if kind < 3:
        node[at] = (key, _other(value, rng, nodes))
    elif kind == 3:
        del node[at]
    elif kind == 4:
        node.insert(rng.randrange(len(node) + 1), (key, _other(value, rng, nodes)))
    elif kind == 5:
        node[at] = (rng.choice((*STRINGS, *LITERALS, key + "x", key[1:])), value)
    elif kind == 6:
        node.append((rng.choice(STRINGS), _other(value, rng, nodes)))
    else:
        rng.shuffle(node)


def _change_list(node: list[Any], at: int, rng: random.Random, nodes: Sequence[list[Any]]) -> None:
    kind = rng.randrange(5)
    if kind < 2:
        node[at] = _other(node[at], rng, nodes)
    elif kind == 2:
        del node[at]
    elif kind == 3:
        node[at:at] = [node[at]] * rng.choice((1, 1, 1, 70, 300))
    else:
        rng.shuffle(node)


def _other(value: Any, rng: random.Random, nodes: Sequence[list[Any]]) -> Any:
    kind = rng.randrange(8)
    if type(value) is int and kind < 5:
        return max(value + rng.choice((-8, -2, -1, 1, 2, 4, 8)), 0) if kind < 3 else value * 2
    if isinstance(value, str) and kind < 3:
        at = rng.randrange(len(value) + 1)
        return value[:at] + rng.choice(("", "0", "a", "\x1f", "é")) + value[at + 1 :]
    if kind == 3:
        return rng.choice(STRINGS)
    if kind == 4:
        return rng.choice((None, True, False, [], Pairs(), *LITERALS))
    if kind == 5:
        return [value] if rng.random() < 0.5 else Pairs([("a", value)])
    if kind == 6:
        depth = rng.choice((2, 30, 33, 3000))
        return Literal("[" * depth + "]" * rng.choice((depth, depth, 0)))
    return rng.choice(NUMBERS)


def _change_data(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    if rng.random() < 0.15:
        del data[at:]
    elif rng.random() < 0.15:
        data += rng.randbytes(rng.choice((1, 4, 64)))
    else:
        data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, data[at] ^ (1 << rng.randrange(8))))


def _add_tensor(tree: Any, data: bytearray, rng: random.Random) -> None:
    """A tensor in the right place, of an unusual shape."""
    shapes: tuple[list[int], ...] = ([], [0], [1], [2, 0], [0, 2], [2**40, 0], [1] * 70, [3, 5])
    shape = list(rng.choice(shapes))
    dtype, bits = rng.choice((("F32", 32), ("BF16", 16), ("F4", 4), ("U8", 8), ("F6_E3M2", 6)))
    elements = 1
    for n in shape:
        elements *= n
    if not isinstance(tree, Pairs):
        return
    size = elements * bits // 8
    entry = Pairs(
        [("dtype", dtype), ("shape", shape), ("data_offsets", [len(data), len(data) + size])]
    )
    tree.append((rng.choice(STRINGS), entry))
    data += bytes(size)


Mutator = Callable[[bytes, random.Random, Sequence[bytes]], bytes]
