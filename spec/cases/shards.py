"""A sharded network, and broken indexes."""

import copy
from collections.abc import Sequence
from typing import Any

from spec import plain_elsa as plain
from spec.cases.build import (
    Entry,
    Profile,
    describe,
    dump,
    dump_sorted,
    elsa_file,
    floats,
    pack_words,
    weights,
    written_elsa_file,
)
from spec.cases.collection import Collection, digests_of, ids


def shard_name(number: int) -> str:
    """The file name of one of two shards."""
    return f"model-{number:05}-of-00002.safetensors"


def make_shards(
    names: Sequence[str] = ("a", "b"), **changes: Any
) -> list[tuple[list[Entry], Profile]]:
    """A network in two shards."""
    first = [
        *(floats(plain.variant("mean", t), [t / 2]) for t in (1, 2)),
        weights("a", "F32", [2, 3], 2, 2, seed=3),
        floats("mean", [0.25]),
    ]
    second = [weights("b", "BF16", [7], 2, 2, seed=4), Entry("c", "U8", [3], b"abc")]
    whole = describe(first + second, 2, names, ["a", "b"], ["mean"])
    shards = []
    for number, (entries, nested) in enumerate(((first, ["a"]), (second, ["b"])), 1):
        per_level = ["mean"] if number == 1 else []
        profile = describe(entries, 2, names, nested, per_level, digests=False)
        profile["levels"] = copy.deepcopy(whole["levels"])
        profile["shard"] = {"number": number, "of": 2}
        shards.append((entries, profile | changes))
    return shards


def make_index(shards: Sequence[tuple[list[Entry], Profile]]) -> Profile:
    """The index of a network in shards."""
    weight_map = {
        entry.name: shard_name(number)
        for number, (entries, _) in enumerate(shards, 1)
        for entry in entries
    }
    total = sum(len(entry.data) for entries, _ in shards for entry in entries)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def add_valid(out: Collection) -> None:
    """Networks in shards."""

    def network(
        folder: str,
        files: dict[str, bytes],
        index: Profile,
        requirement: str,
        text: str,
        **more: Any,
    ) -> None:
        for name, raw in files.items():
            stem = f"{folder}/{name.removesuffix('.safetensors')}"
            out.valid(stem, raw, "55 75", "a shard; nonzero is of the whole network", **more)
        parts = sorted(
            map(plain.validate, files.values()), key=lambda e: e.profile["shard"]["number"]
        )
        out.add(
            f"valid/{folder}/model.safetensors.index.json",
            plain.write_json(index).encode(),
            kind="index",
            verdict="valid",
            bits=2,
            levels=2,
            counts={k: v for part in parts for k, v in part.profile["nested"].items()},
            digests=digests_of(parts, [1, 2]),
            metadata=plain.joined_metadata([part.container for part in parts]),
            requirements=ids(requirement),
            description=text,
            **more,
        )

    shards = make_shards()
    files = {shard_name(i): written_elsa_file(*shard) for i, shard in enumerate(shards, 1)}
    text = "a network in two shards"
    network("sharded", files, make_index(shards), "30 74 75 76 84 95 98", text, written=True)

    first, second = make_shards()
    for level in first[1]["levels"]:
        level |= {"target": 1, "metrics": {"accuracy": 0.5, "loss": 2}, "errors": {"loss": 1}}
    for level in second[1]["levels"]:
        level |= {"target": 1.0, "metrics": {"loss": 2.0, "accuracy": 0.5}, "future": [1]}
        level["errors"] = {"loss": 1.0}
    first[1]["dense"] = {"metrics": {"accuracy": 1}}
    first[1]["metrics"] = {"loss": {"better": "lower"}}
    second[1].update({"version": "1.4", "dense": {"metrics": {"accuracy": 0}}, "future": {}})
    files = {
        "b.safetensors": elsa_file(*first, {"format": "pt", "by": "the first"}),
        "a.safetensors": elsa_file(*second, {"format": "np", "by": "the second", "more": "yes"}),
    }
    index = make_index([first, second])
    index["weight_map"] = {
        name: "b.safetensors" if file == shard_name(1) else "a.safetensors"
        for name, file in index["weight_map"].items()
    }
    index |= {"metadata": {"elsa_level": "means nothing here", "future": None}, "future": {}}
    text = "shards that say the same in other words, and differ where they may"
    network("shards_differ", files, index, "75 95 96 97", text)


def add_cases(out: Collection) -> None:
    """Networks in shards, and broken indexes."""
    add_valid(out)
    shards = make_shards()
    files = {shard_name(i): elsa_file(*shard) for i, shard in enumerate(shards, 1)}
    index = make_index(shards)
    for error, name in (
        ("InvalidIndex", shard_name(1)),
        ("InvalidIndex", shard_name(2)),
        ("CountMismatch", shard_name(1)),
        ("DigestMismatch", shard_name(1)),
    ):
        out.add(
            f"invalid/{error}/{name}",
            files[name],
            kind="elsa",
            verdict="valid",
            requirements=ids("75"),
            description="a shard that the broken indexes beside it name",
        )
    first, second = (shard_name(1), shard_name(2))

    def case(
        name: str, requirement: str, text: str, error: str = "InvalidIndex", **changes: Any
    ) -> None:
        document = {k: v for k, v in (index | changes).items() if v is not ...}
        raw = dump_sorted(document).encode()
        out.invalid(error, name, raw, requirement, text, kind="index")

    weight_map = index["weight_map"]
    missing = "model-00003-of-00002.safetensors"
    case("missing_shard", "74", "a shard that is not there", weight_map=weight_map | {"c": missing})
    case("extra_tensor", "74", "a tensor that no shard holds", weight_map=weight_map | {"x": first})
    case("wrong_shard", "74", "a tensor in another shard", weight_map=weight_map | {"c": first})
    text = "a stored tensor that is not in the map"
    case("lost_tensor", "74", text, weight_map={k: v for k, v in weight_map.items() if k != "c"})
    text = "a variant that is not in the map"
    lost = plain.variant("mean", 1)
    case("lost_variant", "74", text, weight_map={k: v for k, v in weight_map.items() if k != lost})
    text = "one of two shards is named"
    case(
        "lost_shard", "74 75", text, weight_map={k: v for k, v in weight_map.items() if v == first}
    )
    total = index["metadata"]["total_size"]
    case("total_size", "74", "a wrong total size", metadata={"total_size": 1})
    text = "a total size with a fraction"
    case("total_size_float", "21 74", text, metadata={"total_size": float(total)})
    case("metadata", "95", "metadata is an array", metadata=[])
    case("metadata_null", "95", "metadata is null", metadata=None)
    case("no_weight_map", "95", "no weight_map", weight_map=...)
    case("empty_map", "95", "an empty weight_map", weight_map={})
    case("map_array", "95", "weight_map is an array", weight_map=[first])
    case("map_number", "95", "a file name is a number", weight_map=weight_map | {"c": 2})
    text = "comes before UnsafePath: metadata is an array"
    case("first", "79 95", text, metadata=[], weight_map=weight_map | {"c": "../x"})

    def other(
        name: str, requirement: str, text: str, number: int, shard: bytes, error: str = ""
    ) -> None:
        """An index one of whose shards is another file."""
        error = error or "InvalidIndex"
        changed = {
            tensor: f"{name}.safetensors" if file == shard_name(number) else file
            for tensor, file in weight_map.items()
        }
        out.add(
            f"invalid/{error}/{name}.safetensors",
            shard,
            kind="elsa",
            verdict="valid",
            requirements=ids("75"),
            description=f"a shard named by {name}.safetensors.index.json",
        )
        case(name, requirement, text, error, weight_map=changed)

    renamed = elsa_file(*make_shards(["a", "B"])[1])
    other("other_levels", "75", "the level tables of the shards differ", 2, renamed)
    entries, profile = make_shards()[1]
    profile["levels"][0] |= {"metrics": {"loss": 2}}
    other("other_metrics", "75 97", "only one shard has a metric", 2, elsa_file(entries, profile))
    entries, profile = make_shards(bits=3)[1]
    nested = next(entry for entry in entries if entry.name == "b")
    nested.data = bytes(x & 0xFB if i % 2 == 0 else x for i, x in enumerate(nested.data))
    profile["checksums"]["b"] = plain.checksum(nested.data)
    text = "a shard has counters of 3 bits, the other of 2"
    other("other_bits", "75", text, 2, elsa_file(entries, profile))
    numbered = elsa_file(*make_shards(shard={"number": 1, "of": 2})[1])
    other("same_number", "75", "two shards have number 1", 2, numbered)
    counted = elsa_file(*make_shards(shard={"number": 2, "of": 3})[1])
    other("other_number", "75", "a shard counts three shards", 2, counted)
    again = make_shards()[1]
    again[0].append(Entry("mean", "F32", [1], bytes(4)))
    again[1]["checksums"]["mean"] = plain.checksum(bytes(4))
    other("stored_twice", "74", "a tensor in two shards", 2, elsa_file(*again))
    entries, profile = make_shards()[1]
    del profile["shard"]
    profile["levels"] = describe(entries, 2, ["a", "b"], ["b"])["levels"]
    other("no_shard", "75", "a file that is no shard", 2, elsa_file(entries, profile))

    entries, profile = shards[1]
    changed = copy.deepcopy(profile)
    changed["nested"]["b"][0] -= 1
    words = plain.Container(
        b"", {}, {"b": plain.Tensor("BF16", [7], 0, 14)}, entries[0].data
    ).words("b")
    at = next(i for i, word in enumerate(words) if plain.counter(word, 2) == 1)
    words[at] += 1  # frozen at step 2, no longer at step 1
    moved = [Entry("b", "BF16", [7], pack_words("BF16", words)), entries[1]]
    changed["checksums"]["b"] = plain.checksum(moved[0].data)
    text = "the shards together keep one weight less than nonzero says"
    other("shards", "55 76", text, 2, elsa_file(moved, changed), "CountMismatch")
    changed = copy.deepcopy(profile)
    altered = [entries[0], Entry("c", "U8", [3], b"abd")]
    changed["checksums"]["c"] = plain.checksum(b"abd")
    text = "every shard is valid, the network has another digest"
    other("shards", "76", text, 2, elsa_file(altered, changed), "DigestMismatch")

    for name, path in (
        ("parent", "../InvalidIndex/" + second),
        ("absolute", "/etc/passwd"),
        ("hidden_parent", "x/../../" + second),
        ("directory", "x/" + second),
        ("backslash", "..\\" + second),
        ("dots", ".."),
        ("empty", ""),
        ("nul", "\0"),
    ):
        text = f"a shard called {dump(path)}"
        case(name, "77", text, "UnsafePath", weight_map=weight_map | {"c": path})
    raw = dump_sorted(index).encode()
    out.invalid("InvalidJson", "index", raw[:-1], "17", "an index without its last }", kind="index")
    text = "an index that begins with a byte order mark"
    mark = b"\xef\xbb\xbf" + raw
    out.invalid("InvalidJson", "index_byte_order_mark", mark, "14", text, kind="index")
    raw = raw.replace(b'"c":', b'"b":')
    out.invalid("DuplicateKey", "index", raw, "16", "a tensor twice in the index", kind="index")
