"""Any network comes back from its delivery file, byte for byte and level by level."""

import io
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import DELIVERY_BLOCK as BLOCK
from internals import DTYPES
from kinds.networks import Network
from test_every_route import FLOATS, finite, networks

import elsa_format as elsa
from elsa_format import verify

MANTISSAS = {name: DTYPES[name].mantissa for name in FLOATS}


@settings(max_examples=40, deadline=None)
@given(networks(), st.sampled_from([6, 9, 17, 20]), st.sampled_from([1, 2]))
def test_ship_and_back(network: Network, block: int, jobs: int) -> None:
    source, shipped, back = io.BytesIO(), io.BytesIO(), io.BytesIO()
    levels = len(network.names)
    network.write(source)
    raw = source.getvalue()
    report = elsa.ship(io.BytesIO(raw), shipped, block=block, jobs=jobs)
    elsa.extract(io.BytesIO(shipped.getvalue()), back, restore=True)
    assert back.getvalue() == raw
    with elsa.open(shipped) as delivery:
        grown = delivery.load(1)
        with elsa.open(io.BytesIO(raw)) as file:
            for level in sorted({1, (levels + 1) // 2, levels}):
                wanted = file.load(level)
                delivery.upgrade(level)
                assert {n: a.tobytes() for n, a in grown.items()} == {
                    name: array.tobytes() for name, array in wanted.items()
                }
        ends = delivery.network.prefix.document.ends
    assert verify(io.BytesIO(shipped.getvalue())).digests == levels
    assert report.sizes["dense"] == ends[-1]
    if block >= BLOCK:
        assert report.sizes["dense"] <= most(len(raw))


def most(source: int) -> float:
    """The most bytes that a delivery file has (delivery-1.0 §5)."""
    return 1.005 * source + 2000


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SHARED = [np.dtype(kind) for kind in "BbHhIiQqefd?"]


@st.composite
def unwieldy(draw: st.DrawFn) -> bytes:
    """ELSA files that have much around few weights, or weights that nothing can be made of."""
    levels = draw(st.sampled_from([1, 2, 3, 16, 50, 127, 255]))
    bits = draw(st.integers(levels.bit_length(), 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    floats = [dtype for name, dtype in sorted(FLOATS.items()) if bits <= MANTISSAS[name]]
    tensors: dict[str, np.ndarray] = {}
    sizes = st.sampled_from([0, 1, 2, 5, 64, 300, 3000, 140_000])
    for at in range(draw(st.integers(0, 6))):
        dtype, size = draw(st.sampled_from(floats)), draw(sizes)
        tensors[f"{draw(TEXT)}{at}"] = finite(rng, dtype, (size,), bits, levels)
    nested = list(tensors)
    for at in range(draw(st.integers(0, 12))):
        random = rng.integers(0, 256, 8 * draw(st.sampled_from([0, 1, 3, 500])), np.uint8)
        tensors[f"shared {at}"] = random.view(SHARED[at]) if SHARED[at] != "?" else random > 127
    varying = {}
    for at in range(draw(st.integers(0, 8 if levels < 60 else 2))):
        array = rng.integers(0, 2, draw(st.integers(0, 3))).astype(SHARED[at])
        tensors[f"varying {at}"] = array
        varying[f"varying {at}"] = [array] * levels
    prefix, source = draw(TEXT), io.BytesIO()
    specs = [elsa.LevelSpec(f"{prefix}{t}") for t in range(1, levels + 1)]
    metadata = {f"{key} ": value for key, value in draw(st.dictionaries(TEXT, TEXT)).items()}
    contents: Any = {"nested": nested, "per_level": varying, "digests": draw(st.booleans())}
    elsa.write(source, tensors, bits=bits, levels=specs, metadata=metadata, **contents)
    return source.getvalue()


@settings(max_examples=30, deadline=None)
@given(unwieldy())
def test_never_much_larger(raw: bytes) -> None:
    shipped, back = io.BytesIO(), io.BytesIO()
    assert elsa.ship(io.BytesIO(raw), shipped).sizes["dense"] <= most(len(raw))
    elsa.extract(io.BytesIO(shipped.getvalue()), back, restore=True)
    assert back.getvalue() == raw


def test_never_much_larger_with_many_tensors() -> None:
    tensors = {f"layer {i}": np.full(1, 2.0 + i % 7, np.float16) for i in range(2000)}
    source = io.BytesIO()
    elsa.write(source, tensors, levels=[elsa.LevelSpec("1")], nested=list(tensors))
    raw = source.getvalue()
    assert elsa.ship(io.BytesIO(raw), io.BytesIO()).sizes["dense"] <= most(len(raw))
