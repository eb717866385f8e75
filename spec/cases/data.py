"""Damaged data, and data that contradicts its profile."""

import copy
from typing import Any

from spec import plain_elsa as plain
from spec.cases.build import (
    ZEROS,
    Entry,
    describe,
    elsa_file,
    floats,
    frame,
    pack_words,
    place,
)
from spec.cases.collection import Collection
from spec.cases.container import small


def add_cases(out: Collection) -> None:
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
    overlapping = elsa_file(entries, profile | {"header": "xxh3:" + "7" * 16}, {"x": "7" * 47})
    text = "digits that overlap themselves in the header; see checksums.json too"
    out.invalid("ChecksumMismatch", "header_overlap", overlapping, "63", text)
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
    levels: list[dict[str, Any]] = [
        {"name": name, "nonzero": 2, "digest": "sha256:" + "0" * 64} for name in "ab"
    ]
    text = "a counter of 3 comes before the wrong counts and digests of the same tensor"
    more: dict[str, Any] = {"levels": levels, "nested": {"w": [2, 2]}, "checksums": {}}
    data("CounterOutOfRange", "first", [0x3F800001, 0x3F800003], "41 79", text, **more)
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
    more = {"levels": levels, "nested": {"w": [2, 4]}, "checksums": {}}
    data("CountMismatch", "no_checksum", good_words, "43", text, **more)
    made = describe([Entry("w", "F32", [4], pack_words("F32", good_words))], 2, ["a", "b"], ["w"])
    levels = copy.deepcopy(made["levels"])
    levels[1]["digest"] = levels[0]["digest"]
    text = "level 2 has the digest of level 1"
    data("DigestMismatch", "level", good_words, "6 60", text, levels=levels)
    levels = copy.deepcopy(made["levels"])
    levels[0]["digest"] = "sha256:" + "0" * 64
    data("DigestMismatch", "zeros", good_words, "60", "a digest of zeros", levels=levels)
