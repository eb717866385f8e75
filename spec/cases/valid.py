"""Valid files: every dtype and τ, odd shapes and values, unusual documents."""

import copy
import json
import re
from typing import Any

from spec import plain_elsa as plain
from spec.cases.build import (
    ZEROS,
    Entry,
    Profile,
    arrange,
    describe,
    dump_sorted,
    elsa_file,
    embedded,
    floats,
    frame,
    pack_words,
    place,
    weights,
    written_elsa_file,
)
from spec.cases.checksums import numbered
from spec.cases.collection import Collection


def example() -> bytes:
    """The file that §13 prints."""
    pairs = [(1.5, 1), (-0.75, 2), (0.1, 0), (0.25, 2), (-3.0, 1), (-0.01, 0)]
    entries = [embedded("w", [2, 3], 2, pairs)]
    return written_elsa_file(entries, describe(entries, 2, ["67%", "33%"], ["w"]))


def add_counters(out: Collection) -> None:
    """Every dtype, τ and number of levels."""
    text = "the file printed in the spec"
    out.valid("example", example(), "1 9 13 28 29 30 34 43 58 63 84", text, written=True)
    for tau in range(1, 9):
        levels = min(2**tau - 1, 3)
        entries = [
            weights(dtype.lower(), dtype, [3, 3], tau, levels, seed=tau)
            for dtype in ("F64", "F32", "F16", "BF16")
            if tau <= plain.MANTISSA[dtype]
        ]
        names = [f"level {t}" for t in range(1, levels + 1)]
        profile = describe(
            entries,
            tau,
            names,
            [entry.name for entry in entries],
            digests=tau == 2,
            checksums=tau == 2,
        )
        text = f"tau = {tau}, T = {levels}: every dtype that can carry it"
        out.valid(f"tau_{tau}", elsa_file(entries, profile), "1 33 34 35 43 58 59 61", text)
    entries = [weights("w", "F32", [15, 17], 8, 255)]
    names = [str(t) for t in range(1, 256)]
    profile = describe(entries, 8, names, ["w"], digests=False)
    text, some = "T = 255, the most there can be", (1, 2, 127, 128, 254, 255)
    out.valid("levels_255", elsa_file(entries, profile), "34 48", text, some=some)
    entries = [weights("w", "F32", [5], 6, 2)]
    profile = describe(entries, 6, ["a", "b"], ["w"])
    out.valid("bits_wide", elsa_file(entries, profile), "33", "tau = 6 although T = 2 needs only 2")


def add_values(out: Collection) -> None:
    """Bit patterns and shapes that break careless code."""
    entries = []
    for dtype in ("F64", "F32", "F16", "BF16"):
        sign, inf = plain.sign_bit(dtype), plain.infinity(dtype)
        largest = inf - 1
        words = [0, sign, 4, sign | 8, inf - 4, sign | inf - 4, 1, sign | 2, 3]
        words += [largest - 2, sign | largest - 1, largest, (1 << plain.MANTISSA[dtype]) | 1]
        entries.append(Entry(dtype.lower(), dtype, [len(words)], pack_words(dtype, words)))
    profile = describe(entries, 2, ["a", "b", "c"], [entry.name for entry in entries])
    text = "+0, -0, denormals and the largest finite values, dense-only and kept"
    out.valid("special_values", elsa_file(entries, profile), "34 35 36 42", text)

    shapes: list[list[int]]
    shapes = [[], [0], [8], [9], [0, 5], [3, 0], [3, 5], [2, 1, 1, 3]]
    entries = [weights(str(shape), "F32", shape, 2, 3, seed=i) for i, shape in enumerate(shapes)]
    profile = describe(entries, 2, ["a", "b", "c"], [entry.name for entry in entries])
    text = "scalar, empty, one element, odd sizes, up to four dimensions"
    out.valid("shapes", elsa_file(entries, profile), "25 26 27 58 59", text)

    entries = [embedded("w", [10, 15], 1, [(0.5, 0)] * 149 + [(2.0, 1)])]
    profile = describe(entries, 1, ["a"], ["w"])
    text = "rows that begin at every bit of a byte of the bitmask, none of whose words is kept"
    out.valid("rows", elsa_file(entries, profile), "43 59", text)

    zeros = Entry("none", "F32", [5], bytes(20))
    entries = [embedded("all", [3], 1, [(1.0, 1), (2.0, 1), (-3.0, 1)]), zeros]
    profile = describe(entries, 1, ["a"], ["all", "none"])
    out.valid("all_or_none", elsa_file(entries, profile), "43", "all weights kept, and none")

    shared = floats("bias", [1.0, 2.0])
    profile = describe([shared], 2, ["a"], [])
    out.valid("nothing_nested", elsa_file([shared], profile), "48 57", "no nested tensor at all")

    infinite = Entry("limits", "F32", [2], bytes.fromhex("0000807f0000c0ff"))
    entries = [weights("w", "F32", [4], 2, 2), infinite]
    profile = describe(entries, 2, ["a", "b"], ["w"])
    text = "Inf and NaN in a shared tensor are no concern of the format"
    out.valid("shared_non_finite", elsa_file(entries, profile), "42 57", text)

    wide: list[tuple[str, list[int]]]
    wide = [
        ("F32", [2**53, 0]),
        ("F32", [2**53 + 1, 0]),
        ("U8", [2**60 - 1, 0]),
        ("I8", [0, 2**53]),
    ]
    entries = [Entry(f"{dtype} {shape}", dtype, shape, b"") for dtype, shape in wide]
    names = ["mean", *(plain.variant("mean", t) for t in (1, 2))]
    entries += [Entry(name, "F64", [0, 2**53 + 1], b"") for name in names]
    entries.append(weights("w", "F32", [3], 2, 2))
    profile = describe(entries, 2, ["a", "b"], ["w"], ["mean"])
    text = "dimensions above 2^53, some of which differ by one, and one just below the limit"
    out.valid("above_2_53", elsa_file(entries, profile), "20 25 56 58", text)


def add_tensors(out: Collection) -> None:
    """Per-level and shared tensors, and names."""
    out.valid(
        "per_level",
        written_elsa_file(*per_level_network(), {"format": "pt"}),
        "28 29 30 56 57 58 61 84",
        "batch-norm statistics with a variant for each level, of several dtypes",
        written=True,
    )

    entries = [floats("none", []), *(floats(plain.variant("m", t), [float(t)]) for t in (1, 2))]
    entries += [weights("w", "F32", [4], 2, 2), floats("m", [0.0]), floats("e", [], [2, 0])]
    entries += [floats(plain.variant("e", t), [], [2, 0]) for t in (1, 2)]
    profile = describe(entries, 2, ["a", "b"], ["w"], ["e", "m"])
    text = "empty tensors anywhere: variants behind plain tensors, a plain one before variants"
    out.valid("empty_variants", elsa_file(entries, profile), "27 56", text)

    entries = [floats("none", []), weights("w", "F32", [4], 2, 2)]
    profile = describe(entries, 2, ["a", "b"], ["w"], header=False)
    document = {"__metadata__": {"elsa": dump_sorted(profile)}}
    listed = dict(reversed(place(entries).items()))
    raw = frame(json.dumps(document | listed).encode(), entries[1].data)
    text = "a tensor with bytes, listed before an empty one that begins at the same place"
    out.valid("empty_listed_last", raw, "27", text)

    lengths = (0, 2, 3, 6, 8, 12, 16, 17, 128, 129, 240, 241, 1025)
    entries = [Entry(f"{n} bytes", "U8", [n], numbered(n)) for n in lengths]
    entries.append(weights("w", "F32", [4], 2, 2))
    profile = describe(entries, 2, ["a", "b"], ["w"])
    text = "a checksum for every length that XXH3 treats in its own way"
    out.valid("checksum_lengths", elsa_file(entries, profile), "61 89", text)

    for case, whole in (("shared_dtypes", True), ("sub_byte", False)):
        entries = [weights("w", "F32", [4], 2, 2)]
        for dtype, width in plain.WIDTH.items():
            if (width % 8 == 0) == whole:
                data = bytes(i % 2 if dtype == "BOOL" else 37 * i % 256 for i in range(width // 2))
                entries.append(Entry(f"shared {dtype}", dtype, [2, 2], data))
        entries = arrange(entries)
        profile = describe(entries, 2, ["a", "b"], ["w"], checksums=False)
        text = "a shared tensor of every dtype " + ("of whole bytes" if whole else "below a byte")
        out.valid(case, elsa_file(entries, profile), "24 26 57 58", text)

    names = ["層/重み", "caf\u00e9", "cafe\u0301", 'say "hi"\\', "tab\there", "\u007f", "a b"]
    entries = [weights(name, "F32", [3], 2, 2, seed=i) for i, name in enumerate(names)]
    # UTF-16 would sort these two the other way round.
    for i, name in enumerate(["\uff5e", "🦙"]):
        entries.append(floats(name, [float(i)]))
        entries += [floats(plain.variant(name, t), [i + t / 4]) for t in (1, 2)]
    profile = describe(arrange(entries), 2, ["é", "🦙"], names, ["\uff5e", "🦙"])
    text = "Unicode in tensor and level names; order is by UTF-8 bytes, nothing is normalized"
    out.valid("unicode_names", elsa_file(arrange(entries), profile), "14 18 50 58", text)

    entries = [weights("w", "F32", [3], 2, 2)]
    for name in ("1.x", "x"):
        entries.append(floats(name, [0.0]))
        entries += [floats(plain.variant(name, t), [float(t)]) for t in (1, 2)]
    profile = describe(arrange(entries), 2, ["a", "b"], ["w"], ["1.x", "x"])
    text = "a per-level tensor whose own name looks like a variant's: __elsa__.1.1.x"
    out.valid("variant_names", elsa_file(arrange(entries), profile), "54 56 57", text)

    nested, per_level = ["toString", "10", "__proto__", ""], ["9", "__elsa__", "constructor"]
    entries = [weights(name, "F32", [3], 2, 2, seed=i) for i, name in enumerate(nested)]
    for i, name in enumerate(per_level):
        entries.append(floats(name, [float(i)]))
        entries += [floats(plain.variant(name, t), [i + t / 4]) for t in (1, 2)]
    entries += [floats("hasOwnProperty", [1.0]), floats("length", [])]
    profile = describe(arrange(entries), 2, ["10", "__proto__"], nested, per_level)
    profile["levels"][0]["metrics"] = {"10": 1, "9": 2, "__proto__": 3}
    raw = written_elsa_file(arrange(entries), profile, {"__proto__": "10", "10": "9", "": ""})
    text = "names that mean something to programming languages, and none"
    out.valid("names", raw, "22 82 84 85", text, written=True)


def per_level_network() -> tuple[list[Entry], Profile]:
    """A small network with every role of tensor, in the order of §3.5."""
    entries = [
        weights("conv/kernel", "F32", [2, 2, 1, 3], 2, 3, seed=5),
        weights("head/kernel", "BF16", [3, 5], 2, 3, seed=6),
        floats("head/bias", [0.5, -0.5, 0.0, 1.0, -0.0]),
        floats("bn/mean", [0.1, 0.2, 0.3]),
        floats("bn/var", [1.1, 1.2, 1.3]),
        Entry("bn/steps", "I64", [], (1000).to_bytes(8, "little")),
    ]
    levels = (1, 2, 3)
    entries += [floats(plain.variant("bn/mean", t), [t / 8, t / 4, t / 2]) for t in levels]
    entries += [floats(plain.variant("bn/var", t), [t + 0.5, t + 0.25, 1.0]) for t in levels]
    for t in levels:
        steps = (250 * t).to_bytes(8, "little")
        entries.append(Entry(plain.variant("bn/steps", t), "I64", [], steps))
    entries = arrange(entries)
    per_level = ["bn/mean", "bn/var", "bn/steps"]
    nested = ["conv/kernel", "head/kernel"]
    return entries, describe(entries, 2, ["90%", "75%", "50%"], nested, per_level)


def add_documents(out: Collection) -> None:
    """Profiles and headers that are unusual and valid."""
    entries = [weights("w", "F32", [4], 2, 2)]
    required = describe(entries, 2, ["a", "b"], ["w"], digests=False, checksums=False, header=False)
    text = "required keys only: no checksums, no digests"
    out.valid("minimal", elsa_file(entries, required), "48 60 61 63", text)

    full = describe(entries, 2, ["95%", "2:4"], ["w"])
    full["levels"][0] |= {"target": 0.95, "metrics": {"accuracy": 0.93, "loss": -1.5e-3}}
    full["levels"][1] |= {"target": 1, "pattern": "4:4", "metrics": {}}
    full |= {"dense": {"metrics": {"accuracy": 1}}, "requires": [], "per_level": []}
    out.valid("all_fields", elsa_file(entries, full), "45 46 48", "every optional field")

    digits = "3" * 400
    hostile = copy.deepcopy(full)
    names = ["", "10", "__proto__", "constructor", "\u202e\x1b[2J", "a=b", "🦙"]
    hostile["levels"][0]["metrics"] = {name: i / 4 for i, name in enumerate(names)}
    hostile["levels"][0]["errors"] = dict.fromkeys(names, 0) | {"10": 0.125}
    hostile["dense"]["errors"] = {"accuracy": 1e-400}
    about = {"better": "higher", "samples": 2**53 - 1, "recorded": "", "x": None}
    hostile["metrics"] = dict.fromkeys(names[:4], about) | {"loss": {"better": "lower"}}
    text = dump_sorted(hostile).replace("0.125", f"0.{digits}")
    what = "metrics with hostile names, standard errors, and how they were measured"
    out.valid("metrics", elsa_file(entries, text), "21 47 48 82 83 105", what)

    newer = copy.deepcopy(required) | {"version": "1.7", "future": {"bits": 3}}
    out.valid("version_1_7", elsa_file(entries, newer), "45 47", "a later minor version")
    padded = copy.deepcopy(required) | {"version": "1.00"}
    out.valid("version_1_00", elsa_file(entries, padded), "45", "a minor version of two zeros")

    odd = dump_sorted(required | {"levels": [{"name": "a", "nonzero": 0}, {"name": "b"}]})
    metrics = '"metrics":{"a":-0,"b":1e-400,"c":1E+5,"d":10e-1,"e":-0.0,"f":0.1e1}'
    odd = odd.replace('"nonzero":0', f'"nonzero":-0,"target":-0.0,{metrics}')
    odd = odd.replace('"name":"b"', '"name":"b","nonzero":3,"target":1.00000000000000000001')
    late = [embedded("w", [4], 2, [(1.5, 2), (-0.75, 2), (0.1, 0), (2.0, 2)])]
    odd = re.sub(r'"w":\[[0-9,]*\]', '"w":[-0,3]', odd)
    text = "-0 is the integer 0; numbers that underflow, or are 1 only as doubles"
    out.valid("numbers", elsa_file(late, odd), "21 48 83", text)

    deep: Any = "bottom"
    for _ in range(plain.MAX_DEPTH - 1):
        deep = [deep]
    unknown = copy.deepcopy(full) | {"x": deep, "y": None, "z": 2**53 - 1}
    unknown["levels"][0]["x"] = {"nonzero": -1}
    unknown["dense"]["x"] = [1e308, -0.0]
    text = "unknown keys at every depth, nested to the limit of 32"
    out.valid("unknown_keys", elsa_file(entries, unknown), "19 21 47", text)

    partly = copy.deepcopy(required)
    bias = floats("b", [1.0])
    partly["checksums"] = {"b": plain.checksum(bias.data)}
    text = "a checksum for one tensor only"
    out.valid("partial_checksums", elsa_file([*entries, bias], partly), "61", text)

    copied = copy.deepcopy(required) | {"header": ZEROS}
    text = "the header checksum's digits stand in the header twice; both count as zeros"
    out.valid("header_digits_twice", elsa_file(entries, copied, {"copy": ZEROS}), "63", text)

    beside = {"elsa_level": "not a level document"}
    text = "metadata called elsa_level means nothing in an ELSA file"
    out.valid("level_document", elsa_file(entries, required, beside), "90", text)

    # Everything §3.5 asks of Writers, broken: order, padding, whitespace, escapes, alignment.
    narrow = Entry("b", "U8", [3], b"\1\2\3")
    mean = [floats("m", [0.0]), *(floats(plain.variant("m", t), [float(t)]) for t in (1, 2))]
    entries = [*mean[1:], narrow, mean[0], weights("w", "F32", [4], 2, 2)]
    loose = describe(entries, 2, ["a", "b"], ["w"], ["m"], header=False)
    document = dict(reversed(place(entries).items()))
    document["__metadata__"] = {"elsa": "\n" + json.dumps(loose, indent=1) + "\t"}
    header = json.dumps(document, indent=1).replace('"w"', '"\\u0077"').encode() + b"   "
    raw = frame(header, b"".join(entry.data for entry in entries))
    text = "breaks every rule for Writers and is valid"
    out.valid("loose", raw, "15 16 27 28 29 30 32 84 85 87", text)


def add_written(out: Collection) -> None:
    """Every form that numbers, strings and optional fields are written in."""
    some = [(0.5, 1), (-0.75, 2), *((0.125, 0),) * 9, (2.0, 2)]
    entries = [embedded("w\x7f", [3, 4], 2, some), weights("\u2028\n\x1f", "BF16", [3], 2, 2)]
    profile = describe(entries, 2, ['"a"\\', "b\tc"], [entry.name for entry in entries])
    numbers = {plain.write_number(x): x for x in (1.0, 0.93, -1e-6, 1.5e-7, 2.0**53, 1e21, -0.0)}
    profile["levels"][0] |= {"target": 1.0, "metrics": numbers}
    profile["levels"][1] |= {"target": 0.00001, "pattern": "2:4"}
    profile["dense"] = {"metrics": {"\uff5e": 1e20, "🦙": 1e-7, "é": 100.0}}
    profile["dense"]["errors"] = {"🦙": 0.5}
    profile["metrics"] = {"é": {"better": "lower", "samples": 5, "recorded": "\t"}}
    # The room that the largest counts would take is what makes the header 256 bytes longer.
    for length in range(256):
        raw = written_elsa_file(entries, profile, {"pad": "x" * length})
        header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
        if len(header) - len(header.rstrip(b" ")) >= 256:
            break
    text = "every form of numbers and strings, and room for the largest counts"
    out.valid("written", raw, "30 84 85 86 87", text, written=True)


def add_cases(out: Collection) -> None:
    """Add all cases of this module."""
    add_counters(out)
    add_values(out)
    add_tensors(out)
    add_documents(out)
    add_written(out)
