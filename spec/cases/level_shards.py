"""A level in shards, and shards that do not belong together."""

import copy
import re
from collections.abc import Sequence
from typing import Any

from spec import plain_elsa as plain
from spec.cases.build import Entry, Profile, container, dump_sorted, floats
from spec.cases.collection import Collection, error_of, ids
from spec.cases.level_files import level_file, level_parts, written_level_file

SOURCE = "valid/sharded/model.safetensors.index.json"
Shard = tuple[list[Entry], Profile]


def make_shards(files: Sequence[bytes], level: int, layout: str) -> list[Shard]:
    """A level in the shards of the network that it is taken from."""
    shards = [level_parts(raw, level, layout) for raw in files]
    for _, document in shards:
        del document["digest"]
    return shards


def shard_names(stem: str) -> list[str]:
    """The file names of two shards."""
    return [f"{stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]


def make_index(shards: Sequence[Shard], names: Sequence[str], **level: Any) -> Profile:
    """The index of a level in shards; `level` is what it says of the whole."""
    weight_map = {
        entry.name: name
        for name, (entries, _) in zip(names, shards, strict=True)
        for entry in entries
    }
    total = sum(len(entry.data) for entries, _ in shards for entry in entries)
    metadata: Profile = {"total_size": total}
    if level:
        metadata["elsa_level"] = level
    return {"metadata": metadata, "weight_map": weight_map}


def about(document: Profile) -> Profile:
    """What an index says of the whole level."""
    return {key: value for key, value in document.items() if key != "tensors"}


def add_valid(out: Collection) -> None:
    """Levels in shards."""
    network = [
        raw for file, raw in out.files.items() if re.match("valid/sharded/.*[.]safetensors$", file)
    ]
    expected: dict[str, plain.LevelTensor] = {}
    for raw in network:
        expected |= plain.extract(plain.validate(raw), 2)
    digest = plain.level_digest(expected)

    def level(
        stem: str,
        layout: str,
        files: Sequence[bytes],
        index: Profile,
        requirement: str,
        text: str,
        *,
        written: bool = False,
    ) -> None:
        for name, content in zip(shard_names(stem), files, strict=True):
            out.add(
                f"valid/level_shards/{name}",
                content,
                kind="level",
                verdict="valid",
                written=written or None,
                requirements=ids("99"),
                description="one of the shards of a level",
            )
        out.add(
            f"valid/level_shards/{stem}.safetensors.index.json",
            plain.write_json(index).encode(),
            kind="level_index",
            verdict="valid",
            source=SOURCE,
            level=2,
            layout=layout,
            digests={"2": digest},
            written=written or None,
            requirements=ids(requirement),
            description=text,
        )

    for layout in ("dense", "bitmask", "csr"):
        shards = make_shards(network, 2, layout)
        whole = about(shards[0][1]) | {"digest": digest}
        files = [written_level_file(*shard) for shard in shards]
        index = make_index(shards, shard_names(layout), **whole)
        text = f"level 2 of the network in sharded, {layout}"
        requirement = "30 68 74 84 94 95 98 99 100 101 102"
        level(layout, layout, files, index, requirement, text, written=True)

    shards = make_shards(network, 2, "csr")
    index = make_index(shards, shard_names("bare"))
    del index["metadata"]
    text = "an index that says nothing of the level, nor of sizes"
    level("bare", "csr", [level_file(*s) for s in shards], index, "74 99 101", text)

    shards = make_shards(network, 2, "bitmask")
    for entries, document in shards:
        own = {e.name: expected[e.name] for e in entries if not e.name.startswith("__elsa__.")}
        own |= {name: expected[name] for name in document["tensors"]}
        document["digest"] = plain.level_digest(own)
    whole = about(shards[0][1]) | {"digest": digest, "version": "1.2", "future": 1, "requires": []}
    index = make_index(shards, shard_names("own"), **whole)
    text = "shards that state the digests of their own content"
    level("own", "bitmask", [level_file(*s) for s in shards], index, "47 101 102", text)

    shards = make_shards(network, 2, "dense")
    del shards[1][1]["tensors"]
    whole = about(shards[0][1]) | {"digest": "sha256:" + "0" * 64}
    index = make_index(shards, shard_names("unlisted"), **whole)
    text = "a shard does not list its nested tensors: no digest can be compared"
    level("unlisted", "dense", [level_file(*s) for s in shards], index, "66 102", text)


def add_shard(out: Collection, folder: str, file: str, raw: bytes) -> None:
    """A file that a broken index beside it names, whatever it is by itself."""
    text = "a shard that a broken index beside it names"
    metadata = plain.read_container(raw).metadata
    kind = "elsa" if "elsa" in metadata else "level" if "elsa_level" in metadata else "plain"
    if kind == "level" and error_of(lambda: plain.load_level(raw)):
        out.invalid(folder, file.removesuffix(".safetensors"), raw, "99", text, kind="level")
        return
    path = f"invalid/{folder}/{file}"
    out.add(path, raw, kind=kind, verdict="valid", requirements=ids("99"), description=text)


def add_invalid(out: Collection) -> None:
    """Shards that do not belong together, and indexes that say something else."""
    raw = out.files["valid/example.safetensors"]
    entries, document = level_parts(raw, 2, "bitmask")
    digest = document.pop("digest")
    bias = floats("b", [0.5])
    rest: Shard = ([bias], document | {"tensors": {}})
    good: list[Shard] = [(entries, document), rest]
    network = {"w": plain.extract(plain.validate(raw), 2)["w"]}
    network["b"] = plain.LevelTensor(bias.dtype, bias.shape, bias.data, False)
    whole = about(document) | {"digest": plain.level_digest(network)}

    def case(
        name: str,
        requirement: str,
        text: str,
        second: Shard | bytes = rest,
        error: str = "InvalidIndex",
        *,
        schema: bool = False,
        **metadata: Any,
    ) -> None:
        """An index of the first shard and another one."""
        folder = f"invalid/{error}"
        names = ["level-00001-of-00002.safetensors", f"{name}.level.safetensors"]
        if isinstance(second, tuple):
            listed, content = second[0], level_file(*second)
        else:
            held = plain.read_container(second).tensors
            listed = [Entry(n, t.dtype, t.shape, bytes(t.end - t.begin)) for n, t in held.items()]
            content = second
        if second is rest:
            names[1] = "level-00002-of-00002.safetensors"
        for file, made in zip(names, (level_file(*good[0]), content), strict=True):
            if f"{folder}/{file}" not in out.files:
                add_shard(out, error, file, made)
        index = make_index([good[0], (listed, {})], names, **whole)
        for key, value in metadata.items():
            index["metadata"] = {k: v for k, v in index["metadata"].items() if k != key}
            if value is not ...:
                index["metadata"][key] = value
        content = dump_sorted(index).encode()
        out.invalid(error, name, content, requirement, text, kind="level_index", schema=schema)

    def said(**changes: Any) -> Profile:
        """What the index says of the level, changed."""
        return {key: value for key, value in (whole | changes).items() if value is not ...}

    for key, value in (("level", 1), ("name", "other"), ("layout", "csr")):
        changed = (copy.deepcopy(rest[0]), rest[1] | {key: value})
        text = f"shards of another {key}, and no word of it in the index"
        case(f"level_shard_{key}", "100", text, changed, elsa_level=...)
        text = f"the index states another {key} than its shards"
        case(f"level_index_{key}", "101", text, elsa_level=said(**{key: value}))
    text = "a shard without a level document"
    case("level_shard_plain", "99", text, container([bias], {}), elsa_level=...)
    text = "a tensor whole in one shard and in parts in another"
    twice: Shard = ([bias, floats("w", [0.0])], rest[1])
    case("level_twice", "100", text, twice, elsa_level=...)
    text = "a wrong total size"
    case("level_total_size", "74", text, total_size=1)
    text = "what the index says of the level is a string"
    case("level_index_string", "101", text, elsa_level=digest, schema=True)
    text = "the index gives the level no version"
    case("level_index_version", "101", text, elsa_level=said(version=...), schema=True)
    text = "the index gives the level no number"
    case("level_index_number", "101", text, elsa_level=said(level=...), schema=True)
    text = "a digest in upper case in the index"
    upper = said(digest="sha256:" + "A" * 64)
    case("level_index_upper_case", "88 101", text, elsa_level=upper, schema=True)
    text = "the index is of a level, version 2.0; comes before a wrong total size"
    future = said(version="2.0", level=0)
    error = "UnsupportedVersion"
    ids = "45 79 101"
    case("level_index", ids, text, error=error, elsa_level=future, total_size=1, schema=True)
    text = "the index is of a level that requires a feature"
    error, future = "UnsupportedFeature", said(requires=["x"], name=2)
    case("level_index", "46 79 101", text, error=error, elsa_level=future, schema=True)
    text = "the level has another digest"
    wrong = said(digest=digest)
    case("level_index", "102", text, error="DigestMismatch", elsa_level=wrong)
    text = "a shard has another digest than it states"
    stated: Shard = (rest[0], rest[1] | {"digest": digest})
    case("level_shard", "68 102", text, stated, "DigestMismatch")
    text = "a shard is an ELSA file"
    case("level_shard_elsa", "90 99", text, raw, "InvalidLayout")
    text = "a shard holds a value that is zero; comes before the digest"
    zeros = copy.deepcopy(good[0])
    for entry in zeros[0]:
        entry.name = entry.name.replace(".w", ".v")
        if "values" in entry.name:
            entry.data = bytes(len(entry.data))
    zeros[1]["tensors"] = {"v": zeros[1]["tensors"]["w"]}
    case("level_shard_zero", "79 92", text, zeros, "InvalidLayout")


def add_cases(out: Collection) -> None:
    """Levels in shards, valid and not."""
    add_valid(out)
    add_invalid(out)
