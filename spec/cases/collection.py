"""Files with their manifest entries, each checked by the second implementation."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec import plain_elsa as plain

# Cases that differ little from one that is committed: made by --extended only, for the tests.
EXTENDED = {
    "valid": """
        all_or_none level_dense_dtypes level_version_1_3 nothing_nested partial_checksums
        shared_non_finite variant_names version_1_00""",
    "level_shards": """
        csr csr-00001-of-00002 csr-00002-of-00002 dense dense-00001-of-00002
        dense-00002-of-00002 own own-00001-of-00002 own-00002-of-00002 unlisted
        unlisted-00001-of-00002 unlisted-00002-of-00002""",
    "Truncated": "data_cut header_cut header_cut_late level_csr no_header",
    "TrailingData": "newline second_file",
    "HeaderTooLarge": "length_18446744073709551615 length_9223372036854775808",
    "InvalidJson": """
        bad_escape beyond_utf8 comment control_character exponent far_too_deep infinity
        leading_space leading_zero length_0 length_1 level_above_2_53 many_digits metrics_digits
        metrics_nan negative
        overlong_utf8 profile_array profile_below_2_53 profile_byte_order_mark profile_infinite
        profile_lone_surrogate profile_many_digits profile_null profile_too_deep profile_twice
        single_quotes surrogate_utf8 swapped_surrogates trailing_comma trailing_nul two_objects
        utf16""",
    "DuplicateKey": "entry level metadata profile_level",
    "InvalidHeader": """
        before_overflow dtype_null metadata_array metadata_null metadata_number metadata_string
        no_data_offsets no_shape offset_false one_offset shape_number shape_string
        three_offsets""",
    "UnknownDtype": "empty lower_case torch",
    "InvalidOffsets": """
        hole_at_start largest_integer overflow_after_zero overflow_bits overflow_signed
        same_range scalar_empty too_long""",
    "InvalidProfile": """
        bits_null bits_string bits_zero checksum_bare checksum_short checksums_array counts_float
        counts_long counts_negative counts_true dense_array dense_errors dense_metrics errors_array
        errors_dense errors_negative errors_null errors_proto errors_string header_null header_short
        level_digest_newline level_digest_short level_digest_unknown level_empty_name
        level_metrics_array level_metrics_string level_metrics_true level_name_number level_no_name
        level_nonzero_float level_nonzero_negative level_nonzero_true level_pattern_digits
        level_pattern_newline level_pattern_words level_pattern_zero level_string level_target_low
        level_target_null level_target_string levels_empty levels_object metric_array
        metric_better_list metric_number metric_proto metric_recorded metric_recorded_null
        metric_samples_float metric_samples_negative metric_samples_true nested_array nested_number
        no_bits no_nested per_level_number per_level_object per_level_utf16 requires_number
        requires_string shard_above shard_half shard_incomplete shard_null version_digits
        version_long version_number version_short version_sign""",
    "UnsupportedVersion": "0_9 10_0 level",
    "UnsupportedFeature": "first level level-00001-of-00002 level-00002-of-00002 level_index",
    "ProfileMismatch": """
        checksum_missing first nested_bool nested_c64 nested_f8_e4m3 nested_metadata nested_u8
        per_level_missing reserved_part variant_above variant_dtype variant_of_shared
        variants_missing""",
    "CountMismatch": "no_checksum nonzero_low",
    "ChecksumMismatch": "header_digits header_padding nested shared",
    "NonFinite": "f16_inf f32_inf f64_inf kept minus_inf",
    "CounterOutOfRange": "denormal",
    "DigestMismatch": "level_csr level_shard model-00001-of-00002 shards variants zeros",
    "InvalidLayout": """
        bitmask_dtype bitmask_long bitmask_missing bitmask_short dense_part dense_shape
        digest_short digest_upper_case dtype_integer index_mixed index_negative index_order
        index_unsigned index_wide indices_missing indices_short indptr_end indptr_long
        indptr_negative layout_missing level-00001-of-00002 level_shard_elsa level_shard_zero
        name_missing other_part popcount_low profile_beside shape_large shape_large_csr
        shape_negative shape_overflow shape_overflow_zero value_zero_csr values_dtype
        values_missing values_shape version_missing""",
    "InvalidIndex": """
        empty_map first level_index_layout level_index_name level_index_number
        level_index_string level_index_upper_case level_shard_layout level_shard_name
        level_total_size lost_shard lost_variant map_array map_number metadata metadata_null
        no_shard no_weight_map other_number same_number total_size total_size_float wrong_shard""",
    "UnsafePath": "backslash directory dots empty hidden_parent nul",
    "NotElsa": "no_tensors",
}


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
        written: bool = False,
    ) -> None:
        """A valid ELSA file; `some` limits the levels whose digests are listed.

        `written` says that these are the bytes that every Writer has to give.
        """
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
            written=written or None,
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
        suffix = ".safetensors.index.json" if kind.endswith("index") else ".safetensors"
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
    if kind.endswith("index"):
        return "reader"  # confirmed in check_indexes, once the shards are on disk
    if kind == "level":
        opened = error_of(lambda: plain.open_level(raw))
        found = opened or error_of(lambda: plain.load_level(raw))
    else:
        opened = error_of(lambda: plain.open_elsa(raw))
        found = opened or error_of(lambda: plain.validate(raw))
    if found != error:
        raise ValueError(f"a vector for {error} gives {found}")
    return "reader" if opened else "full"
