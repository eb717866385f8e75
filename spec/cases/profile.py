"""Invalid profiles, and profiles that do not fit their tensors."""

import copy
from typing import Any

from spec import plain_elsa as plain
from spec.cases.build import (
    ZEROS,
    Entry,
    arrange,
    container,
    dump,
    elsa_file,
    floats,
    frame,
    place,
)
from spec.cases.collection import Collection
from spec.cases.container import small


def add_profiles(out: Collection) -> None:
    """Profiles that are wrong by themselves."""
    entries, profile = small()
    entries.append(floats("m", [0.0]))

    def case(
        error: str, name: str, requirement: str, text: str, schema: bool, **changes: Any
    ) -> None:
        changed = copy.deepcopy(profile) | changes
        changed = {key: value for key, value in changed.items() if value is not ...}
        raw = elsa_file(entries, changed)
        out.invalid(error, name, raw, requirement, text, schema=schema)

    def bad(name: str, requirement: str, text: str, schema: bool = True, **changes: Any) -> None:
        case("InvalidProfile", name, requirement, text, schema, **changes)

    def level(case: str, text: str, schema: bool = True, **changes: Any) -> None:
        levels = copy.deepcopy(profile["levels"])
        levels[1] |= changes
        levels[1] = {key: value for key, value in levels[1].items() if value is not ...}
        bad(f"level_{case}", "48", text, schema, levels=levels)

    for key in ("version", "bits", "levels", "nested"):
        requirement = "45 48" if key == "version" else "48"
        bad(f"no_{key}", requirement, f"{key} is missing", True, **{key: ...})
    for name, version in (("number", 1.0), ("short", "1"), ("long", "1.0.0"), ("sign", "+1.0")):
        bad(f"version_{name}", "45", f"version {dump(version)}", version=version)
    # A schema validator may use a `$` that matches before a final newline.
    bad("version_newline", "45", "a newline after the version", False, version="1.0\n")
    bad("version_digits", "45", "digits that are not ASCII", version="1.\u0660")
    for name, bits in (("zero", 0), ("nine", 9), ("string", "2"), ("true", True), ("null", None)):
        bad(f"bits_{name}", "48", f"bits is {dump(bits)}", bits=bits)
    bad("bits_float", "21 48", "bits is 2.0, not written as an integer", False, bits=2.0)
    bad("requires_string", "46 48", "requires is a string", requires="x")
    bad("requires_number", "46 48", "requires holds a number", requires=[1])
    bad("levels_empty", "48", "levels is empty", levels=[])
    bad("levels_object", "48", "levels is an object", levels={"a": {"nonzero": 2}})
    bad("level_string", "48", "a level is a string", levels=["a", "b"])
    one, counts = [{"name": "a", "nonzero": 2}], {"w": [2] * 4}
    text = "four levels in two bits"
    bad("too_many_levels", "48", text, False, levels=one * 4, nested=counts)
    level("no_name", "a level without a name", name=...)
    level("empty_name", "a level with an empty name", name="")
    level("name_number", "a level's name is a number", name=2)
    level("no_nonzero", "a level without nonzero", nonzero=...)
    level("nonzero_negative", "nonzero is -1", nonzero=-1)
    level("nonzero_float", "nonzero is 3.0, not written as an integer", False, nonzero=3.0)
    level("nonzero_true", "nonzero is true", nonzero=True)
    level("target_high", "target is 95, a percentage", target=95)
    level("target_low", "target is below 0", target=-0.1)
    level("target_string", "target is a string", target="0.9")
    level("target_null", "target is null", target=None)
    level("pattern_words", "a pattern that is not N:M", pattern="2 of 4")
    level("pattern_zero", "a pattern with 0", pattern="0:4")
    level("pattern_above", "a pattern with N above M", False, pattern="4:2")
    level("pattern_digits", "N above M, though its digits sort before", False, pattern="10:9")
    level("pattern_newline", "a newline after a pattern", False, pattern="2:4\n")
    level("digest_newline", "a newline after a digest", False, digest=f"sha256:{'0' * 64}\n")
    level("digest_short", "a digest of 63 digits", digest="sha256:" + "0" * 63)
    upper = copy.deepcopy(profile["levels"])
    upper[1]["digest"] = "sha256:" + "A" * 64
    bad("level_digest_upper_case", "48 88", "a digest in upper case", levels=upper)
    level("digest_unknown", "a digest by another hash", digest="md5:" + "0" * 32)
    level("metrics_array", "metrics is an array", metrics=[0.5])
    level("metrics_string", "a metric is a string", metrics={"accuracy": "0.5"})
    level("metrics_true", "a metric is true", metrics={"accuracy": True})

    def errors(case: str, requirement: str, text: str, errors: Any, schema: bool = True) -> None:
        levels = copy.deepcopy(profile["levels"])
        levels[1] |= {"metrics": {"accuracy": 0.5}, "errors": errors}
        bad(f"errors_{case}", requirement, text, schema, levels=levels)

    def metric(case: str, text: str, entry: Any, schema: bool = True) -> None:
        bad(f"metric_{case}", "21 48" if not schema else "48", text, schema, metrics=entry)

    errors("array", "48", "errors is an array", [0.1])
    errors("string", "48", "a standard error is a string", {"accuracy": "NaN"})
    errors("null", "48", "a standard error is null", {"accuracy": None})
    errors("negative", "48", "a standard error below 0", {"accuracy": -0.1})
    text = "a standard error of a metric that the level does not have"
    errors("unknown", "105", text, {"loss": 0.1}, False)
    text = "a standard error of __proto__, which is no metric of the level"
    errors("proto", "82 105", text, {"__proto__": 0.1}, False)
    bad("dense_errors", "48", "errors of the dense network is null", dense={"errors": None})
    text = "a standard error of the dense network without its metric"
    bad("errors_dense", "105", text, False, dense={"metrics": {}, "errors": {"accuracy": 0.1}})
    metric("array", "metrics is an array", ["accuracy"])
    metric("number", "metrics of the profile holds a number", {"accuracy": 0.5})
    metric("no_better", "a metric without its direction", {"accuracy": {"samples": 1}})
    metric("better", "a direction that is none", {"accuracy": {"better": "larger"}})
    metric("better_list", "a direction is an array", {"accuracy": {"better": ["higher"]}})
    metric("proto", "a metric called __proto__ is no object", {"__proto__": "higher"})
    entry = {"better": "higher"}
    metric("samples_negative", "samples is -1", {"accuracy": entry | {"samples": -1}})
    metric("samples_true", "samples is true", {"accuracy": entry | {"samples": True}})
    text = "samples is 3.0, not written as an integer"
    metric("samples_float", text, {"accuracy": entry | {"samples": 3.0}}, False)
    metric("recorded", "recorded is an object", {"accuracy": entry | {"recorded": {}}})
    metric("recorded_null", "recorded is null", {"accuracy": entry | {"recorded": None}})
    bad("dense_array", "48", "dense is an array", dense=[])
    bad(
        "dense_metrics",
        "48",
        "a metric of the dense network is null",
        dense={"metrics": {"a": None}},
    )
    bad("nested_array", "48", "nested is an array of names", nested=["w"])
    bad("nested_number", "48", "one number in place of counts", nested={"w": 3})
    bad("counts_short", "48", "one count for two levels", False, nested={"w": [3]})
    bad("counts_long", "48", "three counts for two levels", False, nested={"w": [2, 3, 3]})
    bad("counts_negative", "48", "a negative count", nested={"w": [-1, 3]})
    bad("counts_float", "21 48", "a count written 3.0", False, nested={"w": [2, 3.0]})
    bad("counts_true", "48", "true as a count", nested={"w": [True, 3]})
    bad("counts_decreasing", "49", "counts decrease", False, nested={"w": [3, 2]})
    bad("per_level_object", "48", "per_level is an object", per_level={"m": 1})
    bad("per_level_number", "48", "per_level holds a number", per_level=[1])
    bad("per_level_unsorted", "50", "per_level is not sorted", False, per_level=["n", "m"])
    bad("per_level_twice", "50", "a name twice in per_level", per_level=["m", "m"])
    # U+1F999 sorts before U+FF5E in UTF-16, after it in UTF-8.
    text = "per_level sorted by UTF-16 units, not UTF-8 bytes"
    bad("per_level_utf16", "50", text, False, per_level=["🦙", "\uff5e"])
    bad("nested_and_per_level", "50", "a tensor in both", False, per_level=["w"])
    name = plain.variant("m", 1)
    bad("per_level_reserved", "51", "a reserved name in per_level", per_level=[name])
    bad("nested_reserved", "51", "a reserved name in nested", nested={"w": [2, 3], name: [0, 0]})
    bad("checksums_array", "48", "checksums is an array", checksums=[])
    for name, value in (
        ("short", "xxh3:0"),
        ("bare", "0" * 16),
        ("upper_case", "xxh3:" + "A" * 16),
    ):
        text = "a malformed checksum"
        requirement = "88" if name == "upper_case" else "48"
        bad(f"checksum_{name}", requirement, text, checksums={"w": value})
    bad("header_short", "48 63", "a malformed header checksum", header="xxh3:00")
    text = "a header checksum in upper case"
    bad("header_upper_case", "63 88", text, header="xxh3:" + "A" * 16)
    for case_name, number, schema in (("zero", 0, True), ("half", 0.5, True), ("above", 3, False)):
        text = f"shard {number} of 2"
        bad(f"shard_{case_name}", "48", text, schema, shard={"number": number, "of": 2})
    bad("shard_null", "48", "shard is null", shard=None)
    bad("header_null", "48", "header is null", header=None)
    bad("shard_incomplete", "48", "shard without of", shard={"number": 1})

    case("UnsupportedVersion", "2_0", "45", "version 2.0", True, version="2.0")
    case("UnsupportedVersion", "0_9", "45", "version 0.9", True, version="0.9")
    case("UnsupportedVersion", "10_0", "45", "version 10.0", True, version="10.0")
    text = "versions are compared as text: 01 is not 1"
    case("UnsupportedVersion", "01_0", "45", text, True, version="01.0")
    text = "comes before all that this version would find wrong"
    case(
        "UnsupportedVersion", "first", "45 79", text, True, version="2.0", bits="x", requires=["y"]
    )
    case("UnsupportedFeature", "one", "46", "an unknown feature", True, requires=["deltas"])
    text = "comes before what this version would find wrong"
    case("UnsupportedFeature", "first", "46 79", text, True, requires=["deltas"], bits=0)


def add_mismatches(out: Collection) -> None:
    """Files without a profile, and profiles that do not fit the tensors."""
    entries, profile = small()
    raw = frame(b"{}")
    out.invalid("NotElsa", "no_tensors", raw, "44", "an empty safetensors file")
    raw = frame(dump(place(entries)).encode(), entries[0].data)
    out.invalid("NotElsa", "no_metadata", raw, "44", "a safetensors file without metadata")
    raw = container(entries, {"format": "pt"})
    out.invalid("NotElsa", "no_profile", raw, "44", "a safetensors file without a profile")
    text = "comes before Truncated: no profile, and data is missing"
    out.invalid("NotElsa", "truncated", container(entries, {})[:-1], "44 79", text)

    def case(name: str, requirement: str, text: str, more: list[Entry], **changes: Any) -> None:
        changed = copy.deepcopy(profile) | changes
        raw = elsa_file(arrange(entries + more), changed)
        out.invalid("ProfileMismatch", name, raw, requirement, text)

    mean, variants = floats("m", [0.0]), [floats(plain.variant("m", t), [1.0]) for t in (1, 2)]
    nested = profile["nested"]
    case(
        "nested_missing",
        "52",
        "a nested tensor is not in the file",
        [],
        nested=nested | {"x": [0, 0]},
    )
    case(
        "per_level_missing",
        "52",
        "a per-level tensor is not in the file",
        variants,
        per_level=["m"],
    )
    case("checksum_missing", "52", "a checksum for no tensor", [], checksums={"x": ZEROS})
    case(
        "variant_missing",
        "56",
        "level 2's variant is missing",
        [mean, variants[0]],
        per_level=["m"],
    )
    text = "no variants at all"
    case("variants_missing", "56", text, [mean], per_level=["m"])
    other = floats(plain.variant("m", 2), [1.0], [1, 1])
    text = "a variant of another shape"
    case("variant_shape", "56", text, [mean, variants[0], other], per_level=["m"])
    other = Entry(plain.variant("m", 2), "I32", [1], bytes(4))
    text = "a variant of another dtype"
    case("variant_dtype", "56", text, [mean, variants[0], other], per_level=["m"])
    wide = [Entry("m", "F32", [2**53 + 1, 0], b"")]
    wide += [Entry(plain.variant("m", t), "F32", [2**53, 0], b"") for t in (1, 2)]
    text = "a variant's dimension is 2^53, the tensor's 2^53 + 1"
    case("variant_above_2_53", "20 56", text, wide, per_level=["m"])
    text = "a nested tensor called __metadata__, which no tensor is"
    case("nested_metadata", "22 52", text, [], nested=nested | {"__metadata__": [0, 0]})
    other = floats("__elsa__.02.m", [1.0])
    text = "a variant's number with a leading zero"
    case("variant_zero", "56", text, [mean, variants[0], other], per_level=["m"])
    text = "a variant for level 3 of 2"
    case(
        "variant_above",
        "54",
        text,
        [mean, *variants, floats("__elsa__.3.m", [1.0])],
        per_level=["m"],
    )
    text = "a variant of a tensor that is not per-level"
    case("variant_of_shared", "54", text, [mean, *variants])
    raw = elsa_file([*entries, mean, *variants], profile | {"per_level": ["m"]})
    text = "variants stored after the other tensors"
    out.invalid("ProfileMismatch", "variants_late", raw, "56", text)
    text = "a reserved name that means nothing"
    case("reserved", "54", text, [floats("__elsa__.x", [1.0])])
    text = "parts of a level file"
    case("reserved_part", "54", text, [floats("__elsa__.values.w", [1.0])])
    for dtype in ("I32", "U8", "F8_E4M3", "BOOL", "C64"):
        tensor = Entry("x", dtype, [1], bytes(plain.WIDTH[dtype] // 8))
        text = f"a nested tensor of dtype {dtype}"
        case(f"nested_{dtype.lower()}", "33 53", text, [tensor], nested=nested | {"x": [0, 0]})
    tensor = Entry("x", "BF16", [1], bytes(2))
    text = "8 bits in a BF16 tensor, which has 7"
    case("bits_too_wide", "33 53", text, [tensor], nested=nested | {"x": [0, 0]}, bits=8)
    text = "5 of 4 weights kept"
    case("counts_too_large", "53", text, [], nested={"w": [2, 5]})
    text = "comes before CountMismatch and Truncated"
    raw = elsa_file(entries, copy.deepcopy(profile) | {"nested": {"w": [2, 9]}})[:-1]
    out.invalid("ProfileMismatch", "first", raw, "53 79", text)

    for name, nonzero in (("high", 4), ("low", 2)):
        changed = copy.deepcopy(profile)
        changed["levels"][1]["nonzero"] = nonzero
        text = f"nonzero is {nonzero}, the counts give 3"
        out.invalid("CountMismatch", f"nonzero_{name}", elsa_file(entries, changed), "2 55", text)
    changed["shard"] = {"number": 1, "of": 2}
    text = "a shard keeps more weights than the whole network"
    out.invalid("CountMismatch", "shard_exceeds", elsa_file(entries, changed), "55", text)


def add_cases(out: Collection) -> None:
    """Add all cases of this module."""
    add_profiles(out)
    add_mismatches(out)
