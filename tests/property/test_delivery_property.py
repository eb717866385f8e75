"""Any network comes back from its delivery file, byte for byte and level by level."""

import io

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_every_route import networks

import elsa_format as elsa
from elsa_format import verify


@settings(max_examples=40, deadline=None)
@given(networks(), st.sampled_from([6, 9, 18, 20]), st.sampled_from([1, 2]))
def test_ship_and_back(made: tuple[dict[str, np.ndarray], int, int], block: int, jobs: int) -> None:
    tensors, bits, levels = made
    source, shipped, back = io.BytesIO(), io.BytesIO(), io.BytesIO()
    nested = [name for name in tensors if name != "shared"]
    specs = [elsa.LevelSpec(f"level {t}") for t in range(1, levels + 1)]
    varying = [np.full(3, t, np.float16) for t in range(levels)]
    elsa.write(
        source,
        tensors | {"varying": np.zeros(3, np.float16)},
        bits=bits,
        levels=specs,
        nested=nested,
        per_level={"varying": varying},
    )
    raw = source.getvalue()
    report = elsa.ship(io.BytesIO(raw), shipped, block=block, jobs=jobs)
    with elsa.open_delivery(shipped) as delivery:
        delivery.whole(back)
        assert back.getvalue() == raw
        grown = delivery.load(1)
        with elsa.open(io.BytesIO(raw)) as file:
            for level in sorted({1, (levels + 1) // 2, levels}):
                wanted = file.load(level)
                delivery.upgrade(level)
                assert {n: a.tobytes() for n, a in grown.items()} == {
                    name: array.tobytes() for name, array in wanted.items()
                }
        ends = delivery.prefix.document.ends
    assert verify(io.BytesIO(shipped.getvalue())).digests == levels
    assert report.sizes["dense"] == ends[-1]
    if block >= 18:
        assert ends[-1] - ends[1] <= 1.005 * len(raw) + 12 * 8 * (levels + 1) + 300 * (levels + 1)
