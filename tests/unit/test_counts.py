"""A profile whose counts are not those of the data is noticed on every way to a level."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import elsa_format as elsa


def with_one_weight_less(content: bytes) -> bytes:
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    profile = json.loads(header["__metadata__"]["elsa"])
    del profile["header"]
    profile["nested"]["conv/kernel"][0] -= 1
    profile["levels"][0]["nonzero"] -= 1
    header["__metadata__"]["elsa"] = json.dumps(profile)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + content[8 + size :]


WAYS: dict[str, Callable[[bytes], object]] = {
    "load": lambda content: elsa.open(io.BytesIO(content)).load(1),
    "tensor": lambda content: elsa.open(io.BytesIO(content)).tensor("conv/kernel", 1),
    "load bitmask": lambda content: elsa.open(io.BytesIO(content)).load(1, layout="bitmask"),
    "load csr": lambda content: elsa.open(io.BytesIO(content)).load(1, layout="csr"),
    "stream": lambda content: dict(elsa.stream(io.BytesIO(content), level=1)),
    "extract": lambda content: elsa.extract(io.BytesIO(content), io.BytesIO(), level=1),
    "verify": lambda content: elsa.verify(io.BytesIO(content)),
}


@pytest.mark.parametrize("way", WAYS)
def test_wrong_counts_are_noticed(rich: Path, way: str) -> None:
    content = with_one_weight_less(rich.read_bytes())
    with pytest.raises(elsa.CountMismatch, match="'conv/kernel'"):
        WAYS[way](content)
