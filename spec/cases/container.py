"""Invalid containers: lengths, JSON, header entries, offsets."""

from typing import Any

from spec.cases.build import (
    Entry,
    Profile,
    describe,
    dump,
    dump_sorted,
    elsa_file,
    embedded,
    frame,
)
from spec.cases.collection import Collection


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
    edit("InvalidJson", "beyond_utf8", b'"w":', b'"\xf4\x90\x80\x80":', "14", "above U+10FFFF")
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
    for case, value, requirement in (("nan", "NaN", "17"), ("digits", "9" * 400, "21")):
        changed = f'"dense":{{"errors":{{"a":{value}}},"metrics":{{"a":1}}}},"bits":2'
        text = f"a standard error that is {'NaN' if case == 'nan' else 'an integer of 400 digits'}"
        document("InvalidJson", f"metrics_{case}", '"bits":2', changed, requirement, text)
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
    huge = {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}
    document = {"__metadata__": metadata, "a": huge, "w": []}
    text = "a malformed entry comes before the overflow in an earlier one"
    header("InvalidHeader", "before_overflow", document, "23 79", text)
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
    limit = ("U8", [2**60, 0], [16, 16])
    case("above_2_60", "2^63 bits but for a zero; one less is valid", "25", w=w, b=limit)
    largest = ("U8", [2**63 - 1, 0], [16, 16])
    case("largest_integer", "2^63 - 1 is an integer, 2^63 is not", "20 25", w=w, b=largest)
    text = "comes before Truncated: the offsets reach beyond the file and leave a hole"
    case("beyond_file", text, "27 79", w=w, b=("F32", [1000], [1000, 5000]))


def add_cases(out: Collection) -> None:
    """Add all cases of this module."""
    add_lengths(out)
    add_json(out)
    add_headers(out)
    add_offsets(out)
