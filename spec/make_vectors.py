"""Make spec/vectors/: small valid and invalid files, their manifest, and embedding cases.

    python spec/make_vectors.py            write the vectors and the example in elsa-1.0.md
    python spec/make_vectors.py --check    compare with what is there; exit code 1 if it differs
    python spec/make_vectors.py --extended DIR   write them and about as many more elsewhere

Imports nothing of elsa_format. Every vector is put to the second implementation in plain_elsa.py
before it is written: the valid ones have to pass, the invalid ones to give exactly the error of
the directory they are in.
"""

import argparse
import copy
import hashlib
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for those who run the file itself

from spec import plain_elsa as plain

HERE = Path(__file__).resolve().parent
VECTORS = HERE / "vectors"
SPEC = HERE / "elsa-1.0.md"
EXAMPLE = "valid/example.safetensors"
ZEROS = "xxh3:" + "0" * 16
ALIGNMENT = 256

Profile = dict[str, Any]

# Cases that differ little from one that is committed: made by --extended only, for the tests.
EXTENDED = {
    "valid": """
        all_or_none level_csr_i64 level_dense_listed nothing_nested partial_checksums
        shared_non_finite variant_names""",
    "Truncated": "data_cut header_cut header_cut_late level_csr no_header",
    "TrailingData": "newline second_file",
    "HeaderTooLarge": "length_18446744073709551615 length_9223372036854775808",
    "InvalidJson": """
        bad_escape comment control_character exponent far_too_deep infinity leading_space
        leading_zero length_0 length_1 many_digits negative overlong_utf8 profile_array
        profile_below_2_53 profile_byte_order_mark profile_infinite profile_lone_surrogate
        profile_many_digits profile_null profile_too_deep profile_twice single_quotes
        surrogate_utf8 swapped_surrogates trailing_comma trailing_nul two_objects utf16""",
    "DuplicateKey": "entry level metadata profile_level",
    "InvalidHeader": """
        dtype_null metadata_array metadata_null metadata_number metadata_string
        no_data_offsets no_shape offset_false one_offset shape_number shape_string
        three_offsets""",
    "UnknownDtype": "empty lower_case torch",
    "InvalidOffsets": """
        hole_at_start overflow_after_zero overflow_bits overflow_signed same_range
        scalar_empty too_long""",
    "InvalidProfile": """
        bits_null bits_string bits_zero checksum_bare checksum_short checksums_array
        counts_float counts_long counts_negative counts_true dense_array dense_metrics
        header_short level_digest_short level_digest_unknown level_empty_name
        level_metrics_array level_metrics_string level_metrics_true level_name_number
        level_no_name level_nonzero_float level_nonzero_negative level_nonzero_true
        level_pattern_words level_pattern_zero level_string level_target_low
        level_target_null level_target_string levels_empty levels_object nested_array
        nested_number no_bits no_nested per_level_number per_level_object per_level_utf16
        requires_number requires_string shard_1 shard_3_of_2 shard_incomplete version_digits
        version_long version_number version_short version_sign""",
    "UnsupportedVersion": "0_9 10_0 level",
    "UnsupportedFeature": "first level",
    "ProfileMismatch": """
        checksum_missing first nested_bool nested_c64 nested_f8_e4m3 nested_u8
        per_level_missing reserved_part variant_above variant_dtype variant_of_shared
        variants_missing""",
    "CountMismatch": "no_checksum nonzero_low",
    "ChecksumMismatch": "header_padding nested shared",
    "NonFinite": "f16_inf f32_inf f64_inf kept minus_inf",
    "CounterOutOfRange": "denormal",
    "DigestMismatch": "level_csr model-00001-of-00002 shards variants zeros",
    "InvalidLayout": """
        bitmask_dtype bitmask_long bitmask_missing bitmask_short dense_part dense_shape
        digest_short dtype_integer index_mixed index_negative index_order index_unsigned
        indices_missing indices_short indptr_end indptr_long indptr_negative layout_missing
        level_dense name_missing other_part popcount_low shape_large shape_large_csr
        shape_negative shape_overflow values_dtype values_missing values_shape
        version_missing""",
    "InvalidIndex": """
        empty_map lost_shard lost_variant map_array map_number metadata no_weight_map
        other_number same_number total_size wrong_shard""",
    "UnsafePath": "backslash directory dots empty hidden_parent nul",
    "NotElsa": "no_tensors",
}


# --- Building files ------------------------------------------------------------------------------


@dataclass
class Entry:
    """A tensor to be stored."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes


def dump(value: Any) -> str:
    """JSON as §3.5 asks for, except that keys stay in their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def dump_sorted(value: Any) -> str:
    """JSON as §3.5 asks for."""
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


def container(entries: Sequence[Entry], metadata: dict[str, str], *, pad: bool = False) -> bytes:
    """A safetensors file with the tensors in the given order."""
    document: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    header = dump(document | place(entries)).encode()
    if pad:
        header += b" " * (-(8 + len(header)) % ALIGNMENT)
    return frame(header, b"".join(entry.data for entry in entries))


def sign_header(raw: bytes) -> bytes:
    """Put the header checksum in place of its zeros (§8.2)."""
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length]
    digits = xxhash.xxh3_64_hexdigest(header)
    return raw[:8] + header.replace(ZEROS.encode(), b"xxh3:" + digits.encode()) + raw[8 + length :]


def elsa_file(
    entries: Sequence[Entry],
    profile: Profile | str,
    metadata: dict[str, str] | None = None,
    *,
    pad: bool = False,
) -> bytes:
    """An ELSA file with the given profile, or text in place of one."""
    text = profile if isinstance(profile, str) else dump_sorted(profile)
    return sign_header(container(entries, {**(metadata or {}), "elsa": text}, pad=pad))


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
        profile["checksums"] = {
            entry.name: "xxh3:" + xxhash.xxh3_64_hexdigest(entry.data) for entry in entries
        }
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


# --- The collection ------------------------------------------------------------------------------


@dataclass
class Collection:
    """All files with their manifest entries."""

    extended: bool = False
    """Whether to take the cases in EXTENDED too."""
    files: dict[str, bytes] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)

    def add(self, file: str, raw: bytes, **fields: Any) -> None:
        """Add a file; fields that are None are left out of the manifest."""
        if file in self.files:
            raise ValueError(f"{file} is made twice")
        error, case = file.split("/")[-2:]
        if case.split(".")[0] in EXTENDED.get(error, "").split() and not self.extended:
            return
        self.files[file] = raw
        entry = {"file": file, "sha256": hashlib.sha256(raw).hexdigest(), **fields}
        self.entries.append({key: value for key, value in entry.items() if value is not None})

    def valid(
        self,
        case: str,
        raw: bytes,
        requirements: str,
        description: str,
        *,
        some: Sequence[int] = (),
    ) -> None:
        """A valid ELSA file; `some` limits the levels whose digests are listed."""
        elsa = plain.validate(raw)
        levels = list(some) or range(1, elsa.levels + 1)
        shard = "shard" in elsa.profile
        self.add(
            f"valid/{case}.safetensors",
            raw,
            kind="elsa",
            verdict="valid",
            bits=elsa.profile["bits"],
            levels=elsa.levels,
            counts=elsa.profile["nested"],
            # A shard's profile states the digests of the whole network: see its index.
            digests=None if shard else digests_of([elsa], levels),
            requirements=ids(requirements),
            description=description,
        )

    def invalid(
        self,
        error: str,
        case: str,
        raw: bytes,
        requirements: str,
        description: str,
        *,
        kind: str = "elsa",
        schema: bool = False,
    ) -> None:
        """An invalid file; `schema` says that the JSON Schema has to reject its document."""
        suffix = ".safetensors.index.json" if kind == "index" else ".safetensors"
        self.add(
            f"invalid/{error}/{case}{suffix}",
            raw,
            kind=kind,
            verdict="invalid",
            error=error,
            checked_by=checked_by(error, raw, kind),
            schema="rejects" if schema else None,
            requirements=ids(requirements),
            description=description,
        )


def ids(numbers_: str) -> list[str]:
    """'1 23' as requirement ids."""
    return [f"ELSA-R-{int(number):03}" for number in numbers_.split()]


def digests_of(parts: list[plain.Elsa], levels: Sequence[int]) -> dict[str, str]:
    """The digests of some levels, by level number."""
    digests = plain.check_digests(parts)
    return {str(t): digests[t - 1] for t in levels}


def error_of(action: Callable[[], object]) -> str | None:
    """The registry name of the error that an action gives."""
    try:
        action()
    except plain.Bad as bad:
        return bad.error
    return None


def checked_by(error: str, raw: bytes, kind: str) -> str:
    """Who sees the error: any Reader on opening, or only who reads the data."""
    if kind == "index":
        return "reader"  # confirmed in check_indexes, once the shards are on disk
    if kind == "level":
        found = error_of(lambda: plain.load_level(raw))
        opened = found if found not in ("InvalidLayout", "DigestMismatch") else None
    else:
        opened = error_of(lambda: plain.open_elsa(raw))
        found = opened or error_of(lambda: plain.validate(raw))
    if found != error:
        raise ValueError(f"a vector for {error} gives {found}")
    return "reader" if opened else "full"


# --- Valid files ---------------------------------------------------------------------------------


def example() -> bytes:
    """The file that §13 prints."""
    pairs = [(1.5, 1), (-0.75, 2), (0.1, 0), (0.25, 2), (-3.0, 1), (-0.01, 0)]
    entries = [embedded("w", [2, 3], 2, pairs)]
    return elsa_file(entries, describe(entries, 2, ["67%", "33%"], ["w"]), pad=True)


def add_counters(out: Collection) -> None:
    """Every dtype, τ and number of levels."""
    out.valid("example", example(), "1 9 13 28 29 30 34 43 58 63", "the file printed in the spec")
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


def add_tensors(out: Collection) -> None:
    """Per-level and shared tensors, and names."""
    out.valid(
        "per_level",
        elsa_file(*per_level_network(), {"format": "pt"}, pad=True),
        "28 29 30 56 57 58 61",
        "batch-norm statistics with a variant for each level, of several dtypes",
    )

    entries = [weights("w", "F32", [4], 2, 2)]
    for dtype, width in sorted(plain.WIDTH.items(), key=lambda item: -item[1]):
        data = bytes(i % 2 if dtype == "BOOL" else 37 * i % 256 for i in range(width))
        entries.append(Entry(f"shared {dtype}", dtype, [2, 4], data))
    profile = describe(arrange(entries), 2, ["a", "b"], ["w"], checksums=False)
    text = "a shared tensor of every dtype, the sub-byte ones too"
    out.valid("shared_dtypes", elsa_file(arrange(entries), profile), "24 26 57 58", text)

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
    for t in (1, 2, 3):
        entries += [
            floats(plain.variant("bn/mean", t), [t / 8, t / 4, t / 2]),
            floats(plain.variant("bn/var", t), [t + 0.5, t + 0.25, t + 0.125]),
            Entry(plain.variant("bn/steps", t), "I64", [], (t * 250).to_bytes(8, "little")),
        ]
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
    full["levels"][1] |= {"target": 1, "pattern": "2:4", "metrics": {}}
    full |= {"dense": {"metrics": {"accuracy": 1}}, "requires": [], "per_level": []}
    out.valid("all_fields", elsa_file(entries, full), "45 46 48", "every optional field")

    newer = copy.deepcopy(required) | {"version": "1.7", "future": {"bits": 3}}
    out.valid("version_1_7", elsa_file(entries, newer), "45 47", "a later minor version")

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
    partly["checksums"] = {"b": "xxh3:" + xxhash.xxh3_64_hexdigest(bias.data)}
    text = "a checksum for one tensor only"
    out.valid("partial_checksums", elsa_file([*entries, bias], partly), "61", text)

    copied = copy.deepcopy(required) | {"header": ZEROS}
    text = "the header checksum's digits stand in the header twice; both count as zeros"
    out.valid("header_digits_twice", elsa_file(entries, copied, {"copy": ZEROS}), "63", text)

    # Everything §3.5 asks of Writers, broken: order, padding, whitespace, escapes, alignment.
    narrow = Entry("b", "U8", [3], b"\1\2\3")
    mean = [floats("m", [0.0]), *(floats(plain.variant("m", t), [float(t)]) for t in (1, 2))]
    entries = [narrow, *mean, weights("w", "F32", [4], 2, 2)]
    loose = describe(entries, 2, ["a", "b"], ["w"], ["m"], header=False)
    document = dict(reversed(place(entries).items()))
    document["__metadata__"] = {"elsa": "\n" + json.dumps(loose, indent=1) + "\t"}
    header = json.dumps(document, indent=1).replace('"w"', '"\\u0077"').encode() + b"   "
    raw = frame(header, b"".join(entry.data for entry in entries))
    out.valid("loose", raw, "16 27 28 29 30 32", "breaks every rule for Writers and is valid")


# --- Invalid files: container --------------------------------------------------------------------


def small() -> tuple[list[Entry], Profile]:
    """The network that the invalid files are made from."""
    entries = [embedded("w", [4], 2, [(1.5, 1), (-0.75, 2), (0.1, 0), (2.0, 1)])]
    profile = describe(entries, 2, ["a", "b"], ["w"], digests=False, checksums=False, header=False)
    return entries, profile


def add_lengths(out: Collection) -> None:
    """Wrong sizes of header and file."""
    good = elsa_file(*small())
    header_end = len(good) - 16
    for case, size, requirement, text in (
        ("empty_file", 0, "11", "no byte at all"),
        ("length_cut", 7, "11", "ends in the header length"),
        ("no_header", 8, "11", "ends after the header length"),
        ("header_cut", 9, "11", "ends after the first byte of the header"),
        ("header_cut_late", header_end - 1, "11", "ends one byte before the end of the header"),
        ("no_data", header_end, "2 12", "ends after the header"),
        ("data_cut", header_end + 5, "2 12", "ends inside a weight"),
        ("data_cut_late", len(good) - 1, "2 12", "ends one byte before the end of the data"),
    ):
        out.invalid("Truncated", case, good[:size], requirement, text)
    beyond = frame(good[8:], length=100_000_000)
    out.invalid(
        "Truncated", "length_beyond", beyond, "10 11", "largest legal header length, small file"
    )
    for length in (100_000_001, 2**63, 2**64 - 1):
        raw = frame(good[8:], length=length)
        text = f"header length {length}; comes before Truncated"
        out.invalid("HeaderTooLarge", f"length_{length}", raw, "10 79", text)
    for length in (0, 1):
        raw = frame(good[8:], length=length)
        out.invalid("InvalidJson", f"length_{length}", raw, "10", f"header length {length}")
    out.invalid("TrailingData", "one_byte", good + b"\0", "2 12", "one byte after the data")
    out.invalid("TrailingData", "second_file", good + good, "12", "another file after the data")
    out.invalid("TrailingData", "newline", good + b"\n", "12", "a newline after the data")


def add_json(out: Collection) -> None:
    """Headers and profiles that are no restricted JSON."""
    entries, profile = small()
    good = elsa_file(entries, profile)
    data = good[-16:]
    header = good[8:-16]

    def edit(error: str, case: str, old: bytes, new: bytes, requirement: str, text: str) -> None:
        if header.count(old) != 1:
            raise ValueError(f"{case}: {old!r} is not in the header exactly once")
        out.invalid(error, case, frame(header.replace(old, new), data), requirement, text)

    def whole(case: str, changed: bytes, requirement: str, text: str) -> None:
        out.invalid("InvalidJson", case, frame(changed, data), requirement, text)

    shape = b'"shape":[4]'
    for case, number, text in (
        ("float_shape", b"4.0", "a dimension with a fraction"),
        ("exponent", b"4e0", "a dimension with an exponent"),
        ("negative", b"-4", "a negative dimension"),
        ("minus_zero", b"-0", "-0 as a dimension"),
        ("above_2_63", b"9223372036854775808", "the dimension 2^63"),
        ("many_digits", b"4" * 4400, "a dimension of 4400 digits"),
    ):
        edit("InvalidJson", case, shape, b'"shape":[%s]' % number, "20", text)
    edit("InvalidJson", "leading_zero", shape, b'"shape":[04]', "17", "a leading zero")
    edit("InvalidJson", "nan", shape, b'"shape":[NaN]', "17", "the literal NaN")
    edit("InvalidJson", "infinity", shape, b'"shape":[-Infinity]', "17", "the literal -Infinity")
    edit("InvalidJson", "trailing_comma", shape, b'"shape":[4,]', "17", "a comma before ]")
    edit("InvalidJson", "comment", shape, b'/**/"shape":[4]', "17", "a comment")
    edit("InvalidJson", "single_quotes", b'"shape"', b"'shape'", "17", "single quotes")
    edit("InvalidJson", "control_character", b'"shape"', b'"sha\npe"', "17", "a newline in a key")
    edit("InvalidJson", "bad_escape", b'"shape"', b'"\\shape"', "17", "an escape JSON lacks")
    edit("InvalidJson", "not_utf8", b'"w":', b'"\xff":', "14", "the byte ff in a name")
    edit("InvalidJson", "overlong_utf8", b'"w":', b'"\xc1\xb7":', "14", "w in two bytes")
    edit("InvalidJson", "surrogate_utf8", b'"w":', b'"\xed\xa0\x80":', "14", "a surrogate in UTF-8")
    edit("InvalidJson", "lone_surrogate", b'"w":', b'"\\ud800":', "18", "half a surrogate pair")
    text = "two surrogates in the wrong order"
    edit("InvalidJson", "swapped_surrogates", b'"w":', b'"\\udc00\\ud800":', "18", text)
    text = "arrays nested to depth 33"
    deep = b'"x":' + b"[" * 32 + b"]" * 32 + b',"w":'
    edit("InvalidJson", "too_deep", b'"w":', deep, "19", text)
    deep = b'"x":' + b"[" * 1100 + b"]" * 1100 + b',"w":'
    edit("InvalidJson", "far_too_deep", b'"w":', deep, "19", "arrays nested to depth 1101")
    whole("byte_order_mark", b"\xef\xbb\xbf" + header, "14 15", "a byte order mark")
    whole("utf16", header.decode().encode("utf-16-le"), "14 15", "UTF-16")
    whole("leading_space", b" " + header, "15", "a space before {")
    whole("array", b"[" + header + b"]", "15", "an array, not an object")
    whole("two_objects", header + header, "15", "a second object after the first")
    whole("trailing_newline", header + b"\n", "15", "a newline as padding")
    whole("trailing_nul", header + b"\0\0\0", "15", "NUL as padding")
    whole("unclosed", header[:-1] + b" ", "15 17", "the last } is missing")

    text = "the same tensor twice"
    edit("DuplicateKey", "tensor", b'"w":', b'"w":{},"w":', "16", text)
    edit(
        "DuplicateKey", "escaped", b'"w":', b'"\\u0077":{},"w":', "16", "twice, once with an escape"
    )
    edit("DuplicateKey", "entry", shape, shape + b"," + shape, "16", "a shape twice, both the same")
    edit("DuplicateKey", "elsa", b'{"elsa":', b'{"elsa":"{}","elsa":', "16", "two profiles")
    text = "__metadata__ twice"
    edit("DuplicateKey", "metadata", b'"w":', b'"__metadata__":{},"w":', "16", text)

    def document(error: str, case: str, old: str, new: str, requirement: str, text: str) -> None:
        before = dump_sorted(profile)
        if old and before.count(old) != 1:
            raise ValueError(f"{case}: {old!r} is not in the profile exactly once")
        changed = before.replace(old, new) if old else new
        out.invalid(error, case, elsa_file(entries, changed), requirement, text)

    text = "bits twice in the profile"
    document("DuplicateKey", "profile", '"bits":2', '"bits":2,"bits":2', "16", text)
    text = "a nested tensor twice in the profile"
    document("DuplicateKey", "profile_nested", '"w":[2,3]', '"w":[2,3],"w":[2,3]', "16", text)
    text = "a name twice in a level of the profile"
    document("DuplicateKey", "profile_level", '"name":"a"', '"name":"a","name":"a"', "16", text)
    text = "a key twice below an unknown key of the profile"
    unknown = '"x":[{"y":{"k":1,"k":2}}],"bits":2'
    document("DuplicateKey", "profile_unknown", '"bits":2', unknown, "16 47", text)
    for case, value, requirement, text in (
        ("nan", "NaN", "17", "NaN"),
        ("infinite", "1e999", "21", "a number that overflows a double"),
        ("above_2_53", "9007199254740992", "21", "the integer 2^53"),
        ("below_2_53", "-9007199254740992", "21", "the integer -2^53"),
        ("many_digits", "1" * 4400, "21", "an integer of 4400 digits"),
        ("lone_surrogate", '"\\ud83e"', "18", "half a surrogate pair"),
        ("too_deep", "[" * 32 + "]" * 32, "19", "depth 33"),
    ):
        changed = f'"bits":2,"x":{value}'
        text = f"{text}, below an unknown key of the profile"
        document("InvalidJson", f"profile_{case}", '"bits":2', changed, requirement, text)
    document("InvalidJson", "profile_empty", "", "", "15", "the profile is an empty string")
    document("InvalidJson", "profile_array", "", "[]", "15", "the profile is an array")
    document("InvalidJson", "profile_null", "", "null", "15", "the profile is null")
    before = dump_sorted(profile)
    document("InvalidJson", "profile_twice", "", before * 2, "15", "two documents in the profile")
    text = "the profile begins with a byte order mark"
    document("InvalidJson", "profile_byte_order_mark", "", "\ufeff" + before, "14", text)


def add_headers(out: Collection) -> None:
    """Headers with the wrong structure."""
    entries, profile = small()
    metadata = {"elsa": dump_sorted(profile)}
    good = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    data = entries[0].data

    def header(error: str, case: str, document: Any, requirement: str, text: str) -> None:
        raw = frame(dump(document).encode(), data)
        out.invalid(error, case, raw, requirement, text)

    def entry(error: str, case: str, changed: Any, requirement: str, text: str) -> None:
        header(error, case, {"__metadata__": metadata, "w": changed}, requirement, text)

    value: Any
    for case, value in (("metadata_array", []), ("metadata_null", None), ("metadata_string", "")):
        changed: Any = {"__metadata__": value, "w": good}
        header("InvalidHeader", case, changed, "22", f"__metadata__ is {dump(value)}")
    for case, value in (("metadata_object", profile), ("metadata_number", 1)):
        changed = {"__metadata__": {"elsa": value}, "w": good}
        header("InvalidHeader", case, changed, "22", "a value in __metadata__ is no string")
    for key in good:
        without = {k: v for k, v in good.items() if k != key}
        entry("InvalidHeader", f"no_{key}", without, "23", f"an entry without {key}")
    extra = good | {"strides": [1]}
    entry("InvalidHeader", "extra_key", extra, "23", "an entry with a fourth key")
    entry("InvalidHeader", "entry_array", [], "23", "an entry that is no object")
    entry("InvalidHeader", "dtype_null", good | {"dtype": None}, "23", "dtype is null")
    entry("InvalidHeader", "shape_number", good | {"shape": 4}, "23", "shape is a number")
    entry("InvalidHeader", "shape_string", good | {"shape": ["4"]}, "23", "a dimension in quotes")
    changed = good | {"shape": [4, True]}
    entry("InvalidHeader", "shape_true", changed, "23", "true as a dimension")
    changed = good | {"data_offsets": [16]}
    entry("InvalidHeader", "one_offset", changed, "23", "data_offsets has one element")
    changed = good | {"data_offsets": [0, 16, 16]}
    entry("InvalidHeader", "three_offsets", changed, "23", "data_offsets has three elements")
    changed = good | {"data_offsets": [False, 16]}
    entry("InvalidHeader", "offset_false", changed, "23", "false as an offset")
    for case, dtype in (
        ("f128", "F128"),
        ("lower_case", "f32"),
        ("empty", ""),
        ("torch", "float32"),
    ):
        text = f"dtype {dump(dtype)}"
        entry("UnknownDtype", case, good | {"dtype": dtype}, "24", text)
    changed = {"dtype": "F128", "shape": [4], "data_offsets": [16, 0]}
    text = "an unknown dtype comes before reversed offsets"
    entry("UnknownDtype", "before_offsets", changed, "24 79", text)


def add_offsets(out: Collection) -> None:
    """Offsets that do not tile the data section."""
    entries, profile = small()
    metadata = {"elsa": dump_sorted(profile)}
    data = entries[0].data * 2

    def case(
        name: str, text: str, requirement: str, **tensors: tuple[str, list[int], list[int]]
    ) -> None:
        document: dict[str, Any] = {"__metadata__": metadata}
        for tensor, (dtype, shape, offsets) in tensors.items():
            document[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        out.invalid("InvalidOffsets", name, frame(dump(document).encode(), data), requirement, text)

    w = ("F32", [4], [0, 16])
    case("hole_at_start", "data begins at 4", "27", w=("F32", [4], [4, 20]))
    case("hole", "a hole of 4 bytes", "27", w=w, b=("F32", [3], [20, 32]))
    case("overlap", "two tensors share 4 bytes", "27", w=w, b=("F32", [4], [12, 28]))
    case("same_range", "two tensors in the same bytes", "27", w=w, b=w)
    case("inside", "an empty tensor inside another", "27", w=w, b=("F32", [0], [8, 8]))
    case("reversed", "end before begin", "26", w=("F32", [4], [16, 0]))
    case("too_long", "20 bytes for 4 weights", "26", w=("F32", [4], [0, 20]))
    case("too_short", "12 bytes for 4 weights", "26", w=("F32", [4], [0, 12]))
    case("scalar_empty", "no byte for a scalar", "26", w=w, b=("F32", [], [16, 16]))
    case("inside_a_byte", "three 4-bit elements", "26", w=w, b=("F4", [3], [16, 18]))
    wide = 2**32
    case("overflow_64", "2^64 elements: 0 modulo 2^64", "25", w=w, b=("U8", [wide, wide], [16, 16]))
    case("overflow_bits", "2^62 elements of 32 bits", "25", w=w, b=("F32", [2**62], [16, 16]))
    case("overflow_signed", "2^63 bytes", "25", w=w, b=("U8", [2**33, 2**30], [16, 16]))
    hidden = ("F32", [2**40, 2**40, 0], [16, 16])
    case("overflow_before_zero", "an overflow that a zero hides", "25", w=w, b=hidden)
    hidden = ("F32", [0, 2**40, 2**40], [16, 16])
    case("overflow_after_zero", "an overflow behind a zero", "25", w=w, b=hidden)
    text = "comes before Truncated: the offsets reach beyond the file and leave a hole"
    case("beyond_file", text, "27 79", w=w, b=("F32", [1000], [1000, 5000]))


# --- Invalid files: profile ----------------------------------------------------------------------


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
    bad("version_digits", "45", "digits that are not ASCII", False, version="1.\u0660")
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
    level("digest_short", "a digest of 63 digits", digest="sha256:" + "0" * 63)
    level("digest_upper_case", "a digest in upper case", digest="sha256:" + "A" * 64)
    level("digest_unknown", "a digest by another hash", digest="md5:" + "0" * 32)
    level("metrics_array", "metrics is an array", metrics=[0.5])
    level("metrics_string", "a metric is a string", metrics={"accuracy": "0.5"})
    level("metrics_true", "a metric is true", metrics={"accuracy": True})
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
        bad(f"checksum_{name}", "48", text, checksums={"w": value})
    bad("header_short", "48 63", "a malformed header checksum", header="xxh3:00")
    for number, of, schema in ((0, 2, True), (1.5, 2, True), (3, 2, False)):
        text = f"shard {number} of {of}"
        bad(f"shard_{number}_of_{of}", "48", text, schema, shard={"number": number, "of": of})
    bad("shard_incomplete", "48", "shard without of", shard={"number": 1})

    case("UnsupportedVersion", "2_0", "45", "version 2.0", True, version="2.0")
    case("UnsupportedVersion", "0_9", "45", "version 0.9", True, version="0.9")
    case("UnsupportedVersion", "10_0", "45", "version 10.0", True, version="10.0")
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
    level = make_level(example(), 1, "dense")
    out.invalid("NotElsa", "level_file", level, "44 64", "a level file is no ELSA file")
    text = "comes before Truncated: no profile, and data is missing"
    out.invalid("NotElsa", "truncated", container(entries, {})[:-1], "44 79", text)

    def case(name: str, requirement: str, text: str, more: list[Entry], **changes: Any) -> None:
        changed = copy.deepcopy(profile) | changes
        raw = elsa_file(entries + more, changed)
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


# --- Invalid files: data -------------------------------------------------------------------------


def add_damage(out: Collection) -> None:
    """Bytes that were changed after writing, and data that contradicts its profile."""
    entries = [
        *(floats(plain.variant("m", t), [t / 2]) for t in (1, 2)),
        *small()[0],
        floats("m", [0.5]),
        floats("b", [2.0]),
    ]
    profile = describe(entries, 2, ["a", "b"], ["w"], ["m"])
    good = elsa_file(entries, profile)
    start = 8 + int.from_bytes(good[:8], "little")
    for case, name, flip in (
        ("nested", "w", 0x40),
        ("variant", "__elsa__.2.m", 0x40),
        ("shared", "b", 0x40),
        ("counter", "w", 3),
    ):
        at = start + place(entries)[name]["data_offsets"][0]
        damaged = good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :]
        text = f"bits of the tensor {name} changed; comes before all that follows from it"
        out.invalid("ChecksumMismatch", case, damaged, "6 61 62 79", text)
    unchecked = {key: value for key, value in profile.items() if key != "checksums"}
    changed = [*entries[:-1], floats("b", [3.0])]
    text = "a shared tensor changed in a file without checksums"
    out.invalid("DigestMismatch", "shared", elsa_file(changed, unchecked), "59 60", text)
    swapped = [floats(plain.variant("m", t), [(3 - t) / 2]) for t in (1, 2)]
    raw = elsa_file([*swapped, *entries[2:]], unchecked)
    out.invalid("DigestMismatch", "variants", raw, "57 60", "the variants of two levels swapped")

    entries, profile = small()
    signed = elsa_file(entries, profile | {"header": ZEROS}, {"format": "pt"})
    raw = signed.replace(b'"pt"', b'"np"')
    text = "the header changed in a place that is valid otherwise"
    out.invalid("ChecksumMismatch", "header", raw, "2 63", text)
    raw = elsa_file(entries, profile | {"header": "xxh3:0123456789abcdef"})
    out.invalid("ChecksumMismatch", "header_digits", raw, "63", "a wrong header checksum")
    raw = signed.replace(b'\\"bits\\":2', b'\\"bits\\":9')
    text = "a changed header comes before the profile error it brings"
    out.invalid("ChecksumMismatch", "header_first", raw, "63 79", text)
    header = signed[8:-16] + b" " * 8
    text = "padding added after the checksum was made"
    out.invalid("ChecksumMismatch", "header_padding", frame(header, signed[-16:]), "63", text)

    def data(
        error: str, case: str, words: list[int], requirement: str, text: str, **more: Any
    ) -> None:
        dtype = more.get("dtype", "F32")
        changed = [Entry("w", dtype, [len(words)], pack_words(dtype, words))]
        made = describe(changed, 2, ["a", "b"], ["w"])
        made |= {key: value for key, value in more.items() if key != "dtype"}
        out.invalid(error, case, elsa_file(changed, made), requirement, text)

    text = "a counter of 3 with T = 2; checksum and digest agree with the data"
    data("CounterOutOfRange", "above", [0x3F800001, 0x3F800003, 0], "6 41", text)
    text = "a counter of 3 in a word that is zero otherwise"
    data("CounterOutOfRange", "denormal", [3], "41", text)
    inf = {dtype: plain.infinity(dtype) for dtype in plain.MANTISSA}
    for dtype in ("F64", "F32", "F16", "BF16"):
        words = [0, inf[dtype]]
        data("NonFinite", f"{dtype.lower()}_inf", words, "6 42", f"+Inf in {dtype}", dtype=dtype)
    words = [plain.sign_bit("F32") | inf["F32"]]
    data("NonFinite", "minus_inf", words, "42", "-Inf in a dense-only weight")
    data("NonFinite", "nan", [inf["F32"] | 0x400000], "42", "a NaN in a dense-only weight")
    data("NonFinite", "kept", [inf["F32"] | 1], "42", "Inf with a counter, which makes it a NaN")

    good_words = [0x3FC00001, 0xBF400002, 0x3DCCCCCC, 0x40000001]
    levels = [{"name": "a", "nonzero": 1}, {"name": "b", "nonzero": 3}]
    text = "the profile says 1 weight at level 1, the data has 2"
    data("CountMismatch", "data", good_words, "6 43", text, levels=levels, nested={"w": [1, 3]})
    levels = [{"name": "a", "nonzero": 2}, {"name": "b", "nonzero": 4}]
    text = "the profile says 4 weights at level 2, the data has 3; no checksum"
    more: dict[str, Any] = {"levels": levels, "nested": {"w": [2, 4]}, "checksums": {}}
    data("CountMismatch", "no_checksum", good_words, "43", text, **more)
    made = describe([Entry("w", "F32", [4], pack_words("F32", good_words))], 2, ["a", "b"], ["w"])
    levels = copy.deepcopy(made["levels"])
    levels[1]["digest"] = levels[0]["digest"]
    text = "level 2 has the digest of level 1"
    data("DigestMismatch", "level", good_words, "6 60", text, levels=levels)
    levels = copy.deepcopy(made["levels"])
    levels[0]["digest"] = "sha256:" + "0" * 64
    data("DigestMismatch", "zeros", good_words, "60", "a digest of zeros", levels=levels)


# --- Level files ---------------------------------------------------------------------------------


def level_parts(
    raw: bytes, level: int, layout: str, index: str = "I32"
) -> tuple[list[Entry], Profile]:
    """The tensors and the document of a level file."""
    elsa = plain.validate(raw)
    tensors = plain.extract(elsa, level)
    entries: list[Entry] = []
    for name, tensor in tensors.items():
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
    if layout != "dense":
        document["tensors"] = {
            name: {"dtype": tensor.dtype, "shape": tensor.shape}
            for name, tensor in tensors.items()
            if tensor.nested
        }
    return entries, document


def level_file(entries: Sequence[Entry], document: Profile, *, pad: bool = False) -> bytes:
    """A level file of these tensors."""
    return container(arrange(entries), {"elsa_level": dump_sorted(document)}, pad=pad)


def make_level(raw: bytes, level: int, layout: str) -> bytes:
    """A level file of an ELSA file."""
    return level_file(*level_parts(raw, level, layout))


def add_level_files(out: Collection) -> None:
    """Level files in every layout, and broken ones."""

    def valid(case: str, raw: bytes, source: str, requirement: str, text: str) -> None:
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
            requirements=ids(requirement),
            description=text,
        )

    source = "valid/per_level.safetensors"
    shapes = "valid/shapes.safetensors"
    own = {"dense": "66", "bitmask": "67 69 70", "csr": "67 71 72 73"}
    for layout, requirement in own.items():
        raw = make_level(out.files[source], 2, layout)
        text = f"level 2 of per_level in the {layout} layout"
        valid(f"level_{layout}", raw, source, f"64 65 68 {requirement}", text)
        if layout != "dense":
            raw = make_level(out.files[shapes], 2, layout)
            text = f"every shape in the {layout} layout"
            valid(f"level_{layout}_shapes", raw, shapes, f"68 {requirement}", text)
    entries, document = level_parts(out.files[source], 1, "dense")
    document["tensors"] = level_parts(out.files[source], 1, "csr")[1]["tensors"]
    text = "the dense layout with its nested tensors listed, a later minor version, unknown keys"
    document |= {"version": "1.3", "future": [{}]}
    valid("level_dense_listed", level_file(entries, document), source, "45 47 65 66 68", text)
    entries, document = level_parts(out.files[source], 3, "csr", "I64")
    del document["digest"]
    text = "I64 indices, which a Reader accepts; no digest"
    valid("level_csr_i64", level_file(entries, document), source, "65 72", text)

    network = elsa_file([weights("w", "F32", [3, 5], 2, 2, seed=5)], small()[1] | {"nested": {}})
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

    text = "the plain name is stored too"
    broken("stored_twice", "csr", "67", text, add(floats("w", [0.0])))
    text = "a reserved name that is no part"
    broken("stray_part", "bitmask", "67", text, add(floats("__elsa__.values.b", [0.0])))
    text = "a part of the other layout"
    broken("other_part", "bitmask", "67", text, add(floats("__elsa__.indices.w", [0.0])))
    text = "a reserved name in the dense layout"
    broken("dense_part", "dense", "67", text, add(floats("__elsa__.1.w", [0.0])))
    broken("layout_unknown", "csr", "65", "an unknown layout", write(layout="coo"), schema=True)
    broken("layout_missing", "dense", "65", "no layout", write(layout=...), schema=True)
    broken("tensors_missing", "csr", "65", "no tensors", write(tensors=...), schema=True)
    broken("level_zero", "dense", "65", "level 0", write(level=0), schema=True)
    broken(
        "level_dense", "csr", "65", "the dense network as CSR", write(level="dense"), schema=True
    )
    broken("name_missing", "dense", "65", "no name", write(name=...), schema=True)
    broken("digest_short", "dense", "65", "a short digest", write(digest="sha256:0"), schema=True)
    broken("version_missing", "dense", "65", "no version", write(version=...), schema=True)
    entry = {"w": {"dtype": "I32", "shape": [3, 5]}}
    broken("dtype_integer", "csr", "67", "an integer dtype", write(tensors=entry), schema=True)
    entry = {"w": {"dtype": "F32", "shape": [3, -5]}}
    broken("shape_negative", "csr", "65", "a negative dimension", write(tensors=entry), schema=True)
    huge = {"w": {"dtype": "F32", "shape": [2**40, 2**40]}}
    broken("shape_overflow", "bitmask", "25 65", "a shape that overflows", write(tensors=huge))
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
    raw = container(level_parts(network, 2, "dense")[0], {"format": "pt"})
    out.invalid("NotElsa", "level_document", raw, "64", "no level document", kind="level")
    entries, document = level_parts(network, 2, "bitmask")
    text = dump_sorted(document).replace('"level":2', '"level":2,"level":2')
    raw = container(arrange(entries), {"elsa_level": text})
    out.invalid("DuplicateKey", "level", raw, "16", "level twice in a level document", kind="level")


# --- Shards --------------------------------------------------------------------------------------


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


def add_shards(out: Collection) -> None:
    """A sharded network, and broken indexes."""
    shards = make_shards()
    files = {shard_name(i): elsa_file(*shard) for i, shard in enumerate(shards, 1)}
    for name, raw in files.items():
        stem = f"sharded/{name.removesuffix('.safetensors')}"
        out.valid(stem, raw, "55 75", "a shard; nonzero is of the whole network")
    parts = [plain.validate(raw) for raw in files.values()]
    index = make_index(shards)
    out.add(
        "valid/sharded/model.safetensors.index.json",
        dump_sorted(index).encode(),
        kind="index",
        verdict="valid",
        bits=2,
        levels=2,
        counts={k: v for part in parts for k, v in part.profile["nested"].items()},
        digests=digests_of(parts, [1, 2]),
        requirements=ids("74 75 76"),
        description="a network in two shards",
    )

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
    case("total_size", "74", "a wrong total size", metadata={"total_size": 1})
    case("metadata", "74", "metadata is an array", metadata=[])
    case("no_weight_map", "74", "no weight_map", weight_map=...)
    case("empty_map", "74", "an empty weight_map", weight_map={})
    case("map_array", "74", "weight_map is an array", weight_map=[first])
    case("map_number", "74", "a file name is a number", weight_map=weight_map | {"c": 2})

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
    numbered = elsa_file(*make_shards(shard={"number": 1, "of": 2})[1])
    other("same_number", "75", "two shards have number 1", 2, numbered)
    counted = elsa_file(*make_shards(shard={"number": 2, "of": 3})[1])
    other("other_number", "75", "a shard counts three shards", 2, counted)

    entries, profile = shards[1]
    changed = copy.deepcopy(profile)
    changed["nested"]["b"][0] -= 1
    words = plain.Container(
        b"", {}, {"b": plain.Tensor("BF16", [7], 0, 14)}, entries[0].data
    ).words("b")
    at = next(i for i, word in enumerate(words) if plain.counter(word, 2) == 1)
    words[at] += 1  # frozen at step 2, no longer at step 1
    moved = [Entry("b", "BF16", [7], pack_words("BF16", words)), entries[1]]
    changed["checksums"]["b"] = "xxh3:" + xxhash.xxh3_64_hexdigest(moved[0].data)
    text = "the shards together keep one weight less than nonzero says"
    other("shards", "55 76", text, 2, elsa_file(moved, changed), "CountMismatch")
    changed = copy.deepcopy(profile)
    altered = [entries[0], Entry("c", "U8", [3], b"abd")]
    changed["checksums"]["c"] = "xxh3:" + xxhash.xxh3_64_hexdigest(b"abd")
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
    raw = raw.replace(b'"c":', b'"b":')
    out.invalid("DuplicateKey", "index", raw, "16", "a tensor twice in the index", kind="index")


# --- Embedding cases -----------------------------------------------------------------------------


def embed_cases() -> dict[str, Any]:
    """Words and counters with what each rounding rule makes of them."""
    groups = []
    for dtype in ("F32", "BF16", "F16", "F64"):
        sign, inf, mantissa = plain.sign_bit(dtype), plain.infinity(dtype), plain.MANTISSA[dtype]
        digits = plain.WIDTH[dtype] // 4
        normal = 1 << mantissa
        one = inf // 2 // normal * normal
        for tau in range(1, min(8, mantissa) + 1):
            step, half = 1 << tau, 1 << (tau - 1)
            pairs = [
                (0, 0),
                (sign, 0),
                (1, 0),
                (step - 1, 0),
                (sign | normal, step - 1),
                (one, half),
                (sign | one - 1, 0),
                (one + half - 1, step - 1),
                (sign | one + half, 0),
                (normal - 1, 1),
                (inf - 1, 0),
                (sign | inf - 1, 1),
                (inf - half - 1, step - 1),
            ]
            rows = []
            for word, c in dict.fromkeys(pairs):
                words = [plain.embed(word, c, dtype, tau, how) for how in ("nearest", "overwrite")]
                rows.append([f"{word:0{digits}x}", c, *(f"{w:0{digits}x}" for w in words)])
            groups.append({"dtype": dtype, "tau": tau, "cases": rows})
    refused = []
    for dtype in ("F32", "BF16", "F16", "F64"):
        sign, inf = plain.sign_bit(dtype), plain.infinity(dtype)
        digits = plain.WIDTH[dtype] // 4
        rejects = [(inf, 2, 1), (sign | inf, 2, 0), (inf | 1, 2, 0), (0, 2, 1), (sign, 2, 3)]
        rejects.append((inf // 2, 2, 4))
        if plain.MANTISSA[dtype] < 8:
            rejects.append((inf // 2, 8, 1))
        for word, tau, c in rejects:
            error = ""
            try:
                plain.embed(word, c, dtype, tau, "nearest")
            except plain.Bad as bad:
                error = bad.error
            refused.append([dtype, tau, f"{word:0{digits}x}", c, error])
    return {
        "description": "Embedding (elsa-1.0.md §4.3): words in hex, most significant digit first.",
        "requirements": ids("37 38 39 40"),
        "columns": ["input", "counter", "nearest", "overwrite"],
        "groups": groups,
        "refused_columns": ["dtype", "tau", "input", "counter", "error"],
        "refused": refused,
    }


# --- The example in the specification ------------------------------------------------------------


def annotate(raw: bytes) -> str:
    """The example file as annotated hex."""
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length]
    text = len(header.rstrip(b" "))
    elsa = plain.validate(raw)

    def line(at: int, size: int, note: str) -> str:
        return f"{at:08x}  {raw[at : at + size].hex(' '):<47}  {note}".rstrip()

    lines = [line(0, 8, f"N = {length}: the header's bytes, little-endian")]
    for at in range(8, 8 + text, 16):
        size = min(16, 8 + text - at)
        shown = "".join(chr(c) if 32 <= c < 127 else "." for c in raw[at : at + size])
        lines.append(line(at, size, f"|{shown}|"))
    for at in range(8 + text, 8 + length, 16):
        size = min(16, 8 + length - at)
        note = f"spaces, so that the data begins at {8 + length}" if at == 8 + text else ""
        lines.append(line(at, size, note))
    tau = elsa.profile["bits"]
    for i, word in enumerate(elsa.container.words("w")):
        (value,) = struct.unpack("<f", word.to_bytes(4, "little"))
        c = plain.counter(word, tau)
        kept = [f"level {t}" for t in range(1, elsa.levels + 1) if plain.keep(word, tau, t)]
        where = ", ".join([*kept, "dense"])
        note = f"w[{i // 3},{i % 3}] = {word:08x}, {value: .7f}, counter {c}: {where}"
        lines.append(line(8 + length + 4 * i, 4, note))
    digests = "\n".join(
        f"level {t}: {level['nonzero']} of 6 weights, {level['digest']}"
        for t, level in enumerate(elsa.profile["levels"], 1)
    )
    return f"```\n{chr(10).join(lines)}\n```\n\nIts levels:\n\n```\n{digests}\n```\n"


def with_example(spec: str, raw: bytes) -> str:
    """The specification's text with the example between its marks."""
    begin, end = "<!-- example: made by make_vectors.py -->\n", "<!-- end of example -->"
    before, rest = spec.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{annotate(raw)}\n{end}{after}"


# --- All of it -----------------------------------------------------------------------------------


def check_indexes(root: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Put the sharded vectors, which need their files on disk, to the second implementation."""
    for entry in entries:
        if entry["kind"] == "index":
            path = root / entry["file"]
            opened = error_of(lambda path=path: plain.open_index(path))  # type: ignore[misc]
            found = opened or error_of(lambda path=path: plain.validate_index(path))  # type: ignore[misc]
            if found != entry.get("error"):
                raise ValueError(f"{entry['file']} gives {found}")
            if found and not opened:
                entry["checked_by"] = "full"


def write_all(root: Path, *, extended: bool = False) -> None:
    """Write every vector, the manifest and the embedding cases below a directory."""
    out = Collection(extended)
    for part in (
        *(add_counters, add_values, add_tensors, add_documents),
        *(add_lengths, add_json, add_headers, add_offsets),
        *(add_profiles, add_mismatches, add_damage, add_level_files, add_shards),
    ):
        part(out)
    for file, raw in out.files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(raw)
    check_indexes(root, out.entries)
    lines = ",\n".join(dump(entry) for entry in sorted(out.entries, key=lambda e: str(e["file"])))
    text = f'{{"spec":"ELSA 1.0","vectors":[\n{lines}\n]}}\n'
    (root / "manifest.json").write_text(text, encoding="utf-8")
    cases = embed_cases()
    text = dump(cases).replace('{"dtype"', '\n{"dtype"').replace('"refused', '\n"refused') + "\n"
    (root / "embed.json").write_text(text, encoding="utf-8")


def tree(root: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def main() -> int:
    """Write the vectors, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--extended", type=Path, metavar="DIR", help="write the larger set there")
    options = parser.parse_args()
    if options.extended:
        write_all(options.extended, extended=True)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        write_all(made)
        spec = SPEC.read_text(encoding="utf-8")
        wanted = with_example(spec, (made / EXAMPLE).read_bytes())
        if options.check:
            new, old = tree(made), tree(VECTORS)
            differing = sorted(file for file in new | old if new.get(file) != old.get(file))
            if wanted != spec:
                differing.append(SPEC.name)
            for file in differing:
                print(f"{file} differs from what make_vectors.py makes", file=sys.stderr)
            return 1 if differing else 0
        shutil.rmtree(VECTORS, ignore_errors=True)
        shutil.copytree(made, VECTORS)
        SPEC.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
