"""Hostile and broken headers: one clear error each, never another exception."""

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
from bits import OneByteReader
from internals import parse, read_header

import elsa_format as elsa


def file_of(header: str | bytes, data: bytes = b"") -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw)) + raw + data


def header_of(tensors: dict[str, Any], **metadata: str) -> str:
    return json.dumps({"__metadata__": metadata, **tensors})


ONE = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", elsa.Truncated),
        (b"\x00" * 7, elsa.Truncated),
        (struct.pack("<Q", 100), elsa.Truncated),
        (struct.pack("<Q", 2**63), elsa.HeaderTooLarge),
        (struct.pack("<Q", 100_000_001) + b"{}", elsa.HeaderTooLarge),
        (file_of(""), elsa.InvalidJson),
        (file_of("[]"), elsa.InvalidJson),
        (file_of(" {}"), elsa.InvalidJson),
        (file_of("{}\n"), elsa.InvalidJson),
        (file_of("{"), elsa.InvalidJson),
        (file_of("{}x"), elsa.InvalidJson),
        (file_of(b'{"\xff":1}'), elsa.InvalidJson),
        (file_of("\ufeff{}"), elsa.InvalidJson),
        (file_of('{"\\ud800":{}}'), elsa.InvalidJson),
        (file_of("{" + ONE.replace("[1]", "[1.0]") + "}"), elsa.InvalidJson),
        (file_of("{" + ONE.replace("[1]", "[1e0]") + "}"), elsa.InvalidJson),
        (file_of("{" + ONE.replace("[0,4]", "[-0,4]") + "}"), elsa.InvalidJson),
        (file_of("{" + ONE.replace("[1]", "[NaN]") + "}"), elsa.InvalidJson),
        (file_of("{" + ONE.replace("[1]", f"[{2**63}]") + "}"), elsa.InvalidJson),
        (file_of("{" + ONE.replace("[1]", "[1" + "0" * 5000 + "]") + "}"), elsa.InvalidJson),
        (file_of('{"a":' * 5000 + "1" + "}" * 5000), elsa.InvalidJson),
        (file_of('{"a":' * 40 + "{}" + "}" * 40), elsa.InvalidJson),
        (file_of("{" + ONE + "," + ONE + "}", bytes(4)), elsa.DuplicateKey),
        (file_of('{"__metadata__":{"x":"1","x":"2"}}'), elsa.DuplicateKey),
        (file_of('{"a":{"dtype":"F32","dtype":"F32"}}'), elsa.DuplicateKey),
        (file_of('{"a":1}'), elsa.InvalidHeader),
        (file_of('{"a":{}}'), elsa.InvalidHeader),
        (file_of("{" + ONE[:-1] + ',"more":1}}', bytes(4)), elsa.InvalidHeader),
        (file_of('{"__metadata__":{"x":1}}'), elsa.InvalidHeader),
        (file_of('{"__metadata__":[]}'), elsa.InvalidHeader),
        (file_of("{" + ONE.replace("[1]", "[true]") + "}"), elsa.InvalidHeader),
        (file_of("{" + ONE.replace("[1]", '"1"') + "}"), elsa.InvalidHeader),
        (file_of("{" + ONE.replace("[0,4]", "[0,4,8]") + "}"), elsa.InvalidHeader),
        (file_of("{" + ONE.replace("F32", "F33") + "}"), elsa.UnknownDtype),
        (file_of("{" + ONE.replace("[0,4]", "[4,0]") + "}"), elsa.InvalidOffsets),
        (file_of("{" + ONE.replace("[0,4]", "[0,8]") + "}"), elsa.InvalidOffsets),
        (file_of("{" + ONE.replace("[0,4]", "[4,8]") + "}"), elsa.InvalidOffsets),
        (
            file_of("{" + ONE + "," + ONE.replace('"a"', '"b"') + "}", bytes(4)),
            elsa.InvalidOffsets,
        ),
        (
            file_of("{" + ONE.replace("[1]", f"[{2**62},{2**62}]") + "}"),
            elsa.InvalidOffsets,
        ),
        (
            file_of("{" + ONE.replace("[0,4]", "[0,0]").replace("[1]", f"[0,{2**62},9]") + "}"),
            elsa.InvalidOffsets,
        ),
        (
            file_of('{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}', b"x"),
            elsa.InvalidOffsets,
        ),
        (file_of("{}"), elsa.NotElsa),
        (file_of('{"__metadata__":{"format":"pt"}}'), elsa.NotElsa),
    ],
)
def test_a_broken_container_is_refused(content: bytes, error: type[elsa.ElsaError]) -> None:
    for use in (elsa.open, elsa.verify, lambda source: list(elsa.stream(source))):
        with pytest.raises(error) as caught:
            use(io.BytesIO(content))
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)


def test_every_truncation_is_noticed(rich: Path) -> None:
    content = rich.read_bytes()
    with pytest.raises(elsa.TrailingData):
        elsa.open(io.BytesIO(content + b"\0"))
    with pytest.raises(elsa.TrailingData):
        elsa.verify(OneByteReader(content + b"\0"))
    for size in range(len(content)):
        with pytest.raises(elsa.Truncated):
            elsa.open(io.BytesIO(content[:size]))
    for size in {*range(0, 1200, 7), *range(len(content) - 400, len(content), 3)}:
        with pytest.raises(elsa.Truncated):
            for _ in elsa.stream(OneByteReader(content[:size]), level=1):
                pass


def test_no_flipped_bit_changes_a_network_unnoticed(rich: Path) -> None:
    content = bytearray(rich.read_bytes())
    original = elsa.open(io.BytesIO(content))
    unnoticed = []
    for at in range(len(content)):
        content[at] ^= 1 << at % 8
        try:
            elsa.verify(io.BytesIO(content))
        except elsa.FormatError:
            pass
        else:
            unnoticed.append(at)
            assert elsa.open(io.BytesIO(content)).profile == original.profile
        content[at] ^= 1 << at % 8
    # Only in the name of the key that holds the header's checksum: then there is none to compare.
    start = content.index(b'\\"header\\":')
    assert set(unnoticed) <= set(range(start + 2, start + 8))


def test_whatever_is_accepted_the_safetensors_library_reads_alike(rich: Path) -> None:
    content = rich.read_bytes()
    header = read_header(io.BytesIO(content), "file")
    seen = dict(safetensors.deserialize(content))
    assert seen.keys() == header.tensors.keys()
    for name, info in header.tensors.items():
        assert seen[name]["dtype"] == info.dtype.name
        assert seen[name]["shape"] == list(info.shape)
        assert len(seen[name]["data"]) == info.nbytes


def test_the_data_starts_aligned_and_tensors_follow_by_width(rich: Path) -> None:
    header = read_header(io.BytesIO(rich.read_bytes()), "file")
    assert header.data_start % 256 == 0
    variants = [name.startswith("__elsa__.") for name in header.tensors]
    assert variants == sorted(variants, reverse=True)
    assert all(info.start % (info.dtype.size // 8) == 0 for info in header.tensors.values())


def test_messages_stay_on_one_line_whatever_a_name_holds() -> None:
    with pytest.raises(elsa.InvalidHeader) as caught:
        parse(json.dumps({"a\nb\x1b[31m": {}}).encode(), "file")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_hundred_thousand_tensors(to_file: Callable[[bytes], Path]) -> None:
    entries = {
        f"layer.{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(100_000)
    }
    profile = {"version": "1.0", "bits": 1, "levels": [{"name": "x", "nonzero": 0}], "nested": {}}
    path = to_file(file_of(header_of(entries, elsa=json.dumps(profile)), bytes(100_000)))
    with elsa.open(path) as file:
        assert len(file.tensors) == 100_000
        assert file.tensor("layer.99999", 1).tolist() == [0]
