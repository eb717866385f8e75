"""A level has the same bits whichever way it is read (ELSA-R decoding and layouts)."""

import io
from unittest import mock

import numpy as np
import pytest
from bits import FLOATS, OneByteReader, by_safetensors, level_by_definition, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import LevelReader
from scipy.sparse import csr_array

import elsa_format as elsa

SHAPES = st.sampled_from(
    [(), (1,), (0,), (3,), (8,), (0, 3), (3, 0), (1, 1), (2, 3, 5), (7, 13), (1, 65), (33, 9)]
)


@st.composite
def networks(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], int, int]:
    """Nested weights with arbitrary finite bit patterns, and shared tensors beside them."""
    levels = draw(st.sampled_from([1, 2, 3, 5, 31, 127]))
    bits = draw(st.integers(levels.bit_length(), 7))
    tensors: dict[str, np.ndarray] = {}
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    for at in range(draw(st.integers(1, 3))):
        dtype = FLOATS[draw(st.sampled_from(sorted(FLOATS)))]
        shape = draw(SHAPES)
        tensors[f"层/{at}"] = finite(rng, dtype, shape, bits, levels)
    tensors["shared"] = rng.integers(0, 256, draw(st.integers(0, 9))).astype(np.uint8)
    return tensors, bits, levels


def finite(
    rng: np.random.Generator, dtype: np.dtype, shape: tuple[int, ...], bits: int, levels: int
) -> np.ndarray:
    """Random bit patterns, with denormals, zeros and the largest values; counters ≤ levels."""
    word = np.dtype(f"u{dtype.itemsize}")
    size = int(np.prod(shape))
    words = rng.integers(0, 2 ** (8 * word.itemsize - 1), size, np.uint64).astype(word)
    special = rng.integers(0, 8, size)
    one, sign = word.type(1), word.type(1 << (8 * word.itemsize - 1))
    words[special == 0] = 0
    words[special == 1] = sign  # -0
    words[special == 2] = rng.integers(1, 1 << bits, (special == 2).sum())  # denormals
    infinity = np.array([np.inf]).astype(dtype).view(word)[0]
    words[(words & (sign - one)) >= infinity] = infinity - one  # the largest finite value
    words |= rng.integers(0, 2, size).astype(word) * sign
    counters = rng.integers(0, levels + 1, size).astype(word)
    words = (words & ~word.type((1 << bits) - 1)) | counters
    return words.view(dtype).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(networks(), st.sampled_from([64, 128, 4096, 1 << 20]))
def test_a_level_is_the_same_by_every_route(
    made: tuple[dict[str, np.ndarray], int, int], block: int
) -> None:
    tensors, bits, levels = made
    nested = [name for name in tensors if name != "shared"]
    written = io.BytesIO()
    elsa.write(
        written,
        tensors,
        levels=[elsa.LevelSpec(f"level {t}") for t in range(1, levels + 1)],
        nested=nested,
        bits=bits,
    )
    content = written.getvalue()
    assert same_bits(by_safetensors(content), tensors)
    with mock.patch.object(LevelReader, "block", block):
        for level in {1, (levels + 1) // 2, levels}:
            expected = {
                name: level_by_definition(array, bits, level) if name in nested else array
                for name, array in tensors.items()
            }
            check_routes(content, level, expected, bits)
        check_dense(content, tensors)


def check_routes(content: bytes, level: int, expected: dict[str, np.ndarray], bits: int) -> None:
    file = elsa.open(io.BytesIO(content))
    assert same_bits(file.load(level), expected)
    for name, array in expected.items():
        assert same_bits({"": file.tensor(name, level)}, {"": array})
    assert same_bits(dict(elsa.stream(io.BytesIO(content), level=level)), expected)
    assert same_bits(dict(elsa.stream(OneByteReader(content), level=level)), expected)
    for name in file.nested:
        dense = file.tensor(name)
        assert same_bits({"": elsa.mask_level(dense, bits, level)}, {"": expected[name]})
    digest = file.levels[level - 1].digest
    assert elsa.level_digest(expected, file.nested) == digest
    for layout in ("dense", "bitmask", "csr"):
        extracted = io.BytesIO()
        elsa.extract(OneByteReader(content), extracted, level=level, layout=layout)
        assert len(extracted.getvalue()) == file.size(level, layout)
        assert same_bits(elsa.load_level(io.BytesIO(extracted.getvalue())), expected)
        stored = by_safetensors(extracted.getvalue())
        if layout == "dense":
            assert same_bits(stored, expected)
        loaded = {
            name: array if isinstance(array, np.ndarray) else array.to_dense()
            for name, array in file.load(level, layout=layout).items()
        }
        assert same_bits(loaded, expected)


def check_dense(content: bytes, tensors: dict[str, np.ndarray]) -> None:
    assert same_bits(elsa.open(io.BytesIO(content)).load(), tensors)
    extracted = io.BytesIO()
    elsa.extract(io.BytesIO(content), extracted, level="dense")
    assert same_bits(by_safetensors(extracted.getvalue()), tensors)
    elsa.verify(io.BytesIO(content))


@settings(max_examples=40, deadline=None)
@given(networks())
def test_cutting_a_file_keeps_its_first_levels(
    made: tuple[dict[str, np.ndarray], int, int],
) -> None:
    tensors, bits, levels = made
    written = io.BytesIO()
    specs = [elsa.LevelSpec(f"level {t}") for t in range(1, levels + 1)]
    nested = [name for name in tensors if name != "shared"]
    elsa.write(written, tensors, levels=specs, nested=nested, bits=bits)
    whole = elsa.open(written)
    top = (levels + 1) // 2
    cut = io.BytesIO()
    elsa.extract(io.BytesIO(written.getvalue()), cut, level=top, keep_levels=True)
    elsa.verify(io.BytesIO(cut.getvalue()))
    file = elsa.open(cut)
    assert [level.digest for level in file.levels] == [x.digest for x in whole.levels[:top]]
    assert same_bits(file.load(1), whole.load(1))
    assert same_bits(file.load(), whole.load(top))


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_scipy_reads_the_csr_layout(dtype: str) -> None:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((40, 6, 5)).astype(FLOATS[dtype])
    written = io.BytesIO()
    elsa.pack({"w": weights}, written, sparsities=[90, 50])
    file = elsa.open(written)
    csr = file.load(1, layout="csr")["w"]
    matrix = csr_array((csr.data, csr.indices, csr.indptr), csr.matrix_shape)
    matrix.check_format(full_check=True)
    assert matrix.toarray().tobytes() == file.tensor("w", 1).tobytes()
