"""A level has the same bits whichever way it is read (ELSA-R decoding and layouts)."""

import io
import itertools
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import pytest
from bits import FLOATS, OneByteReader, by_safetensors, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from internals import LevelReader
from kinds.files import ELSA, KINDS, LAYOUT_NAMES, Kind
from kinds.networks import Network
from kinds.operations import OPERATIONS, Work
from kinds.shelf import Shelf
from scipy.sparse import csr_array

import elsa_format as elsa

SHAPES = st.sampled_from(
    [(), (1,), (0,), (3,), (8,), (0, 3), (3, 0), (1, 1), (2, 3, 5), (7, 13), (1, 65), (33, 9)]
)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Nested weights with arbitrary finite bit patterns; a shared tensor and one of each level."""
    levels = draw(st.sampled_from([1, 2, 3, 5, 31, 127]))
    bits = draw(st.integers(levels.bit_length(), 7))
    tensors: dict[str, np.ndarray] = {}
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    for at in range(draw(st.integers(1, 3))):
        dtype = FLOATS[draw(st.sampled_from(sorted(FLOATS)))]
        shape = draw(SHAPES)
        tensors[f"层/{at}"] = finite(rng, dtype, shape, bits, levels)
    nested = tuple(tensors)
    tensors["shared"] = rng.integers(0, 256, draw(st.integers(0, 9))).astype(np.uint8)
    tensors["varying"] = np.zeros(3, np.float16)
    variants = [np.full(3, t, np.float16) for t in range(levels)]
    names = tuple(f"level {t}" for t in range(1, levels + 1))
    return Network(tensors, nested, names, bits, {"varying": variants})


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


ROUTES = [
    OPERATIONS[name]
    for name in (
        *("load", "load as bitmask", "load as csr", "tensor", "stream", "load_level"),
        *("open_delivery", "extract as dense", "extract as bitmask", "extract as csr"),
        "keep levels",
    )
]


@settings(max_examples=50, deadline=None)
@given(
    networks(),
    st.sampled_from([64, 128, 4096, 1 << 20]),
    st.sampled_from([ELSA, *(kind for kind in KINDS if not kind.sharded)]),
)
def test_a_level_is_the_same_by_every_route(network: Network, block: int, kind: Kind) -> None:
    with TemporaryDirectory() as folder, mock.patch.object(LevelReader, "block", block):
        shelf = Shelf(network, Path(folder))
        content = shelf.path(ELSA).read_bytes()
        stored = by_safetensors(content)
        assert same_bits({name: stored[name] for name in network.tensors}, network.tensors)
        check_kind(shelf, kind)
        with elsa.open(shelf.path(ELSA)) as file:
            for level in {1, shelf.middle, shelf.top}:
                expected = network.level(level)
                digest = file.levels[level - 1].digest
                assert elsa.level_digest(expected, file.nested) == digest
                for name in file.nested:
                    masked = elsa.mask_level(file.tensor(name), network.bits, level)
                    assert same_bits({"": masked}, {"": expected[name]})
                for layout in LAYOUT_NAMES:
                    size = shelf.level(level, layout).stat().st_size
                    assert file.size(level, layout) == size


def check_kind(shelf: Shelf, kind: Kind) -> None:
    """By every route, from a file and from a pipe that gives one byte at a time."""
    assert elsa.verify(shelf.path(kind)).digests
    content = shelf.path(kind).read_bytes()
    for operation, level in itertools.product(ROUTES, [1, shelf.middle, shelf.top, "dense"]):
        if operation.takes(kind) and level in operation.levels(kind, shelf):
            expected = shelf.network.level(level)
            for place in {"path", "pipe"}.intersection(operation.places):
                with TemporaryDirectory() as folder:
                    source = OneByteReader(content) if place == "pipe" else str(shelf.path(kind))
                    found = operation.run(source, level, Work(kind, shelf, Path(folder)))
                assert same_bits(dict(found or {}), expected), (operation, place)


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
