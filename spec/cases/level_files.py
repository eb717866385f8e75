"""Level files in every layout, valid and broken."""

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

from spec import plain_elsa as plain
from spec.cases.build import (
    Entry,
    Profile,
    container,
    describe,
    dump_sorted,
    elsa_file,
    floats,
    pack_words,
    padded,
    weights,
)
from spec.cases.collection import Collection, ids


def level_parts(
    raw: bytes, level: int, layout: str, index: str = "I32"
) -> tuple[list[Entry], Profile]:
    """The tensors and the document of a level file."""
    elsa = plain.validate(raw)
    tensors = plain.extract(elsa, level)
    entries: list[Entry] = []
    for name in stored_order(elsa, level):
        tensor = tensors[name]
        if not tensor.nested or layout == "dense":
            entries.append(Entry(name, tensor.dtype, tensor.shape, tensor.data))
            continue
        flags, values = plain.split_kept(tensor)
        kept = sum(flags)
        if layout == "bitmask":
            mask = plain.pack_bits(flags)
            entries.append(Entry(f"__elsa__.bitmask.{name}", "U8", [len(mask)], mask))
        else:
            rows, columns = plain.matrix(tensor.shape)
            positions = [i for i, flag in enumerate(flags) if flag]
            indptr = [sum(i < row * columns for i in positions) for row in range(rows + 1)]
            indices = [i % columns for i in positions]
            entries.append(
                Entry(f"__elsa__.indptr.{name}", index, [rows + 1], pack_words(index, indptr))
            )
            entries.append(
                Entry(f"__elsa__.indices.{name}", index, [kept], pack_words(index, indices))
            )
        entries.append(Entry(f"__elsa__.values.{name}", tensor.dtype, [kept], values))
    document: Profile = {
        "version": "1.0",
        "level": level,
        "name": elsa.profile["levels"][level - 1]["name"],
        "layout": layout,
        "digest": plain.level_digest(tensors),
    }
    document["tensors"] = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape}
        for name, tensor in tensors.items()
        if tensor.nested
    }
    if layout != "dense":
        entries.sort(key=lambda entry: -plain.WIDTH[entry.dtype])
    return entries, document


def stored_order(elsa: plain.Elsa, level: int) -> list[str]:
    """The tensors of a level in the order of the stored ones that they are taken from (§9.1)."""
    places = elsa.container.tensors
    varying = elsa.profile.get("per_level", [])
    stored = {
        name: places[plain.variant(name, level) if name in varying else name]
        for name in plain.extract(elsa, level)
    }
    return sorted(stored, key=lambda name: (stored[name].begin, stored[name].end))


def level_file(entries: Sequence[Entry], document: Profile) -> bytes:
    """A level file of these tensors."""
    return container(entries, {"elsa_level": dump_sorted(document)})


def written_level_file(
    entries: Sequence[Entry], document: Profile, metadata: dict[str, str] | None = None
) -> bytes:
    """The level file that every Writer has to make of this (§3.5, §9.1)."""
    texts = {**(metadata or {}), "elsa_level": plain.write_json(document)}
    return container(entries, texts, padded(entries, texts))


def make_level(raw: bytes, level: int, layout: str) -> bytes:
    """The level file of an ELSA file that every Writer has to make."""
    metadata = plain.joined_metadata([plain.read_container(raw)])
    return written_level_file(*level_parts(raw, level, layout), metadata)


def add_cases(out: Collection) -> None:
    """Level files in every layout, and broken ones."""

    def valid(
        case: str, raw: bytes, source: str, requirement: str, text: str, *, written: bool = True
    ) -> None:
        level = plain.load_level(raw)
        document = json.loads(plain.read_container(raw).metadata["elsa_level"])
        expected = plain.extract(plain.validate(out.files[source]), document["level"])
        if {n: t.data for n, t in level.items()} != {n: t.data for n, t in expected.items()}:
            raise ValueError(f"{case} does not decode to its level")
        out.add(
            f"valid/{case}.safetensors",
            raw,
            kind="level",
            verdict="valid",
            source=source,
            level=document["level"],
            layout=document["layout"],
            digests={str(document["level"]): plain.level_digest(expected)},
            written=written or None,
            requirements=ids(requirement),
            description=text,
        )

    source = "valid/per_level.safetensors"
    shapes = "valid/shapes.safetensors"
    own = {"dense": "66", "bitmask": "67 69 70", "csr": "67 71 72 73 93"}
    for layout, requirement in own.items():
        raw = make_level(out.files[source], 2, layout)
        text = f"level 2 of per_level in the {layout} layout"
        valid(f"level_{layout}", raw, source, f"64 65 68 84 94 {requirement}", text)
        if layout != "dense":
            raw = make_level(out.files[shapes], 2, layout)
            text = f"every shape in the {layout} layout"
            valid(f"level_{layout}_shapes", raw, shapes, f"68 {requirement}", text)
        raw = make_level(out.files["valid/tau_2.safetensors"], 2, layout)
        text = f"F64, F32, F16 and BF16 in the {layout} layout"
        valid(f"level_{layout}_dtypes", raw, "valid/tau_2.safetensors", requirement, text)
    rows = "valid/rows.safetensors"
    text = "rows that begin at every bit of an empty byte of the bitmask"
    valid("level_csr_rows", make_level(out.files[rows], 1, "csr"), rows, own["csr"], text)
    names = "valid/names.safetensors"
    text = "names that mean something to programming languages, in a level file"
    valid("level_names", make_level(out.files[names], 2, "bitmask"), names, "82 91", text)
    entries, document = level_parts(out.files[source], 1, "dense")
    document |= {"version": "1.3", "future": [{}]}
    text = "a later minor version, unknown keys"
    raw = level_file(entries, document)
    valid("level_version_1_3", raw, source, "45 47 65", text, written=False)
    document |= {"tensors": ..., "digest": "sha256:" + "0" * 64}
    document = {key: value for key, value in document.items() if value is not ...}
    text = "the dense layout without its nested tensors listed: no digest can be compared"
    raw = level_file(entries[::-1], document)
    valid("level_dense_unlisted", raw, source, "66 68", text, written=False)
    network_entries = [weights("w", "F32", [3, 5], 2, 2, seed=5), floats("b", [1.0])]
    network = elsa_file(network_entries, describe(network_entries, 2, ["a", "b"], ["w"]))

    def broken(
        case: str,
        layout: str,
        requirement: str,
        text: str,
        change: Callable[[dict[str, Entry], Profile], object],
        *,
        error: str = "InvalidLayout",
        schema: bool = False,
    ) -> None:
        entries, document = level_parts(network, 2, layout)
        by_name = {
            entry.name.removesuffix(".w").removeprefix("__elsa__."): entry for entry in entries
        }
        change(by_name, document)
        kept = [entry for entry in by_name.values() if entry.dtype]
        document = {key: value for key, value in document.items() if value is not ...}
        raw = level_file(kept, document)
        out.invalid(error, case, raw, requirement, text, kind="level", schema=schema)

    def put(part: str, position: int, value: int) -> Callable[[dict[str, Entry], Profile], object]:
        """Change one element of a part."""

        def change(parts: dict[str, Entry], _: Profile) -> None:
            size = plain.WIDTH[parts[part].dtype] // 8
            data = bytearray(parts[part].data)
            at = position * size if position >= 0 else len(data) + position * size
            data[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
            parts[part].data = bytes(data)

        return change

    def drop(part: str) -> Callable[[dict[str, Entry], Profile], object]:
        return lambda parts, _: parts.pop(part)

    def retype(part: str, dtype: str) -> Callable[[dict[str, Entry], Profile], object]:
        """The part with another dtype and as many zero elements."""

        def change(parts: dict[str, Entry], _: Profile) -> None:
            parts[part].dtype = dtype
            parts[part].data = bytes(parts[part].shape[0] * plain.WIDTH[dtype] // 8)

        return change

    def resize(part: str, by: int) -> Callable[[dict[str, Entry], Profile], object]:
        """The part with more or fewer elements."""

        def change(parts: dict[str, Entry], _: Profile) -> None:
            size = plain.WIDTH[parts[part].dtype] // 8
            parts[part].shape = [parts[part].shape[0] + by]
            parts[part].data = (parts[part].data + bytes(64))[: parts[part].shape[0] * size]

        return change

    def write(**fields: Any) -> Callable[[dict[str, Entry], Profile], object]:
        return lambda _, document: document.update(fields)

    def add(entry: Entry) -> Callable[[dict[str, Entry], Profile], object]:
        return lambda parts, _: parts.update({entry.name: entry})

    entries, _ = level_parts(network, 2, "bitmask")
    mask = next(entry.data for entry in entries if "bitmask" in entry.name)
    dropped = next(i for i in range(8) if not mask[0] >> i & 1)
    text = "one bit more than there are values"
    broken("popcount_high", "bitmask", "70", text, put("bitmask", 0, mask[0] | 1 << dropped))
    text = "fewer bits than there are values"
    broken("popcount_low", "bitmask", "70", text, put("bitmask", 0, 0))
    text = "bit 15 of 15 elements is set, one bit less elsewhere"

    def unused(parts: dict[str, Entry], _: Profile) -> None:
        whole = int.from_bytes(mask, "little")
        lowest = whole & -whole
        parts["bitmask"].data = (whole - lowest | 1 << 15).to_bytes(2, "little")

    broken("unused_bit", "bitmask", "70", text, unused)
    for layout in ("bitmask", "csr"):
        text = f"a kept word that is zero, in the {layout} layout; no digest"

        def zero(parts: dict[str, Entry], document: Profile) -> None:
            put("values", 0, 0)(parts, document)
            document["digest"] = ...

        broken(f"value_zero_{layout}", layout, "92", text, zero)
    broken("bitmask_long", "bitmask", "69", "a byte too many", resize("bitmask", 1))
    broken("bitmask_short", "bitmask", "69", "a byte too few", resize("bitmask", -1))
    broken("bitmask_dtype", "bitmask", "69", "a bitmask of dtype I8", retype("bitmask", "I8"))
    broken("bitmask_missing", "bitmask", "69", "no bitmask", drop("bitmask"))
    broken("values_missing", "bitmask", "69", "no values", drop("values"))
    broken("values_dtype", "bitmask", "69", "values of dtype I32", retype("values", "I32"))
    text = "values of two dimensions"

    def reshape(parts: dict[str, Entry], _: Profile) -> None:
        parts["values"].shape = [1, parts["values"].shape[0]]

    broken("values_shape", "bitmask", "69", text, reshape)

    broken("indptr_start", "csr", "73", "indptr begins with 1", put("indptr", 0, 1))
    broken("indptr_end", "csr", "73", "indptr does not end with k", put("indptr", -1, 1))
    text = "indptr goes beyond k and back: decreases"
    broken("indptr_decreasing", "csr", "73", text, put("indptr", 1, 100))
    broken("indptr_negative", "csr", "73", "a negative indptr", put("indptr", 1, -1))
    broken("index_high", "csr", "73", "column 5 of 5", put("indices", -1, 5))
    broken("index_negative", "csr", "73", "column -1", put("indices", 0, -1))
    text = "the same column twice in a row"
    entries, _ = level_parts(network, 2, "csr")
    by_name = {entry.name: entry.data for entry in entries}
    row = struct.unpack("<4i", by_name["__elsa__.indptr.w"])
    columns = struct.unpack(f"<{row[-1]}i", by_name["__elsa__.indices.w"])
    start = next(row[r] for r in range(3) if row[r + 1] - row[r] > 1)
    broken("index_twice", "csr", "73", text, put("indices", start + 1, columns[start]))
    text = "columns of a row out of order"
    broken("index_order", "csr", "73", text, put("indices", start, columns[start + 1] + 1))
    broken("indptr_long", "csr", "71", "indptr has rows + 2 elements", resize("indptr", 1))
    broken("indices_short", "csr", "71", "fewer indices than values", resize("indices", -1))
    broken("indices_missing", "csr", "71", "no indices", drop("indices"))
    broken("index_unsigned", "csr", "72", "indices of dtype U32", retype("indices", "U32"))
    broken("index_mixed", "csr", "72", "indices I64, indptr I32", retype("indices", "I64"))
    text = "I64 where I32 is enough"
    entries, document = level_parts(network, 2, "csr", "I64")
    raw = level_file(entries, document)
    out.invalid("InvalidLayout", "index_wide", raw, "72", text, kind="level")
    text = "I32 for 2^31 columns, of which one is kept"

    def widen(parts: dict[str, Entry], document: Profile) -> None:
        document["tensors"]["w"]["shape"] = [1, 2**31]
        document["digest"] = ...
        for part, numbers in (("indptr", [0, 1]), ("indices", [7])):
            parts[part].shape = [len(numbers)]
            parts[part].data = struct.pack(f"<{len(numbers)}i", *numbers)
        parts["values"].shape, parts["values"].data = [1], parts["values"].data[:4]

    broken("index_narrow", "csr", "72", text, widen)

    text = "the plain name is stored too"
    broken("stored_twice", "csr", "67", text, add(floats("w", [0.0])))
    text = "a reserved name that is no part"
    broken("stray_part", "bitmask", "67", text, add(floats("__elsa__.values.b", [0.0])))
    text = "a part of the other layout"
    broken("other_part", "bitmask", "67", text, add(floats("__elsa__.indices.w", [0.0])))
    text = "a reserved name in the dense layout"
    broken("dense_part", "dense", "67", text, add(floats("__elsa__.1.w", [0.0])))

    def list_part(parts: dict[str, Entry], document: Profile) -> None:
        add(floats("__elsa__.1.w", [1.0]))(parts, document)
        document["tensors"]["__elsa__.1.w"] = {"dtype": "F32", "shape": [1]}
        document["digest"] = ...

    text = "a reserved name in the dense layout that tensors lists"
    broken("dense_part_listed", "dense", "67 91", text, list_part, schema=True)
    broken("layout_unknown", "csr", "65", "an unknown layout", write(layout="coo"), schema=True)
    broken("layout_missing", "dense", "65", "no layout", write(layout=...), schema=True)
    broken("tensors_missing", "csr", "65", "no tensors", write(tensors=...), schema=True)
    broken("level_zero", "dense", "65", "level 0", write(level=0), schema=True)
    broken("name_missing", "dense", "65", "no name", write(name=...), schema=True)
    broken("digest_short", "dense", "65", "a short digest", write(digest="sha256:0"), schema=True)
    upper = write(digest="sha256:" + "A" * 64)
    broken("digest_upper_case", "csr", "65 88", "a digest in upper case", upper, schema=True)
    broken("version_missing", "dense", "65", "no version", write(version=...), schema=True)
    entry = {"w": {"dtype": "I32", "shape": [3, 5]}}
    broken("dtype_integer", "csr", "67", "an integer dtype", write(tensors=entry), schema=True)
    entry = {"w": {"dtype": "F32", "shape": [3, -5]}}
    broken("shape_negative", "csr", "65", "a negative dimension", write(tensors=entry), schema=True)
    huge = {"w": {"dtype": "F32", "shape": [2**40, 2**40]}}
    broken("shape_overflow", "bitmask", "91", "a shape that overflows", write(tensors=huge))
    huge = {"w": {"dtype": "F32", "shape": [2**40, 0, 2**40]}}
    text = "a shape that overflows but for a zero"
    broken("shape_overflow_zero", "bitmask", "91", text, write(tensors=huge))
    text = "a reserved name in tensors"
    entry = {"__elsa__.1.w": {"dtype": "F32", "shape": [0]}}
    broken("tensors_reserved", "bitmask", "91", text, write(tensors=entry), schema=True)
    text = "seen as a matrix of all dimensions but the last × the last"
    entry = {"w": {"dtype": "F32", "shape": [1, 3, 5]}}
    broken("matrix", "csr", "71 93", text, write(tensors=entry))
    huge = {"w": {"dtype": "F32", "shape": [2**40]}}
    broken("shape_large", "bitmask", "69", "4 TiB declared, 2 bytes given", write(tensors=huge))
    huge = {"w": {"dtype": "F32", "shape": [1, 2**40]}}
    text = "4 TiB declared in the CSR layout, too few rows given"
    broken("shape_large_csr", "csr", "71", text, write(tensors=huge))
    entry = {"w": {"dtype": "F32", "shape": [15]}}
    text = "tensors in the dense layout disagree with what is stored"
    broken("dense_shape", "dense", "66", text, write(tensors=entry))
    error = "UnsupportedVersion"
    broken(
        "level",
        "dense",
        "45 65",
        "a level file 2.0",
        write(version="2.0"),
        error=error,
        schema=True,
    )
    error = "UnsupportedFeature"
    text = "a level file with a feature"
    broken("level", "csr", "46 65", text, write(requires=["x"]), error=error, schema=True)
    error = "DigestMismatch"
    for layout in ("bitmask", "csr"):
        text = f"one bit of a value changed in the {layout} layout"
        broken(f"level_{layout}", layout, "68", text, put("values", 0, 0x3F800001), error=error)
        entries, document = level_parts(network, 2, layout)
        raw = level_file(entries, document)
        text = f"a {layout} level file ends early"
        out.invalid("Truncated", f"level_{layout}", raw[:-1], "12", text, kind="level")
    entries, document = level_parts(network, 2, "bitmask")
    text = dump_sorted(document).replace('"level":2', '"level":2,"level":2')
    raw = container(entries, {"elsa_level": text})
    out.invalid("DuplicateKey", "level", raw, "16", "level twice in a level document", kind="level")
    text = dump_sorted(document).replace("[3,5]", f"[3,5,{2**53}]")
    raw = container(entries, {"elsa_level": text})
    text = "a dimension of 2^53 in a level document"
    out.invalid("InvalidJson", "level_above_2_53", raw, "21 91", text, kind="level")
    text = "an ELSA file is no level file; comes before Truncated"
    out.invalid("InvalidLayout", "elsa_file", network[:-1], "79 90", text, kind="level")
    text = "one bit of the level document's key changed: its parts are not a checkpoint's tensors"
    raw = container(entries, {"elsa_levem": dump_sorted(document)})
    out.invalid("NotElsa", "level_reserved", raw, "103", text, kind="level")
    raw = container(entries, {"elsa": "{}", "elsa_level": "{}"})
    text = "a level document beside a profile; comes before what is wrong with either"
    out.invalid("InvalidLayout", "profile_beside", raw, "79 90", text, kind="level", schema=True)
