"""The kernels refuse what they can't do safely, and agree on tensors of a real size."""

import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from internals import _kernels, _pure, import_line
from kernel_modules import HAVE_COMPILER, NATIVE, each_implementation

WIDTHS = [2, 4, 8]
INF = {2: 0x7F80, 4: 0x7F800000, 8: 0x7FF << 52}
NAMES = [name for name in _kernels.__all__ if name not in ("NATIVE", "kernels")]


@pytest.mark.skipif(not os.environ.get("CI"), reason="only CI insists")
@pytest.mark.skipif(not HAVE_COMPILER, reason="no C compiler")
def test_the_c_module_is_built_where_there_is_a_compiler() -> None:
    assert NATIVE is not None


@pytest.mark.parametrize("asked", ["1", ""])
def test_environment_chooses_numpy(asked: str) -> None:
    script = f"{import_line('_kernels')}; print(_kernels.mask.__module__, _kernels.NATIVE)"
    environment = os.environ | {"ELSA_PURE_PYTHON": asked}
    run = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    pure = bool(asked) or importlib.util.find_spec("elsa_format._native") is None
    assert (run.stdout.split() == [_pure.__name__, "False"]) == pure


# A valid call of every kernel, with the arrays by name so that a test can spoil one of them.
def calls(width: int = 4) -> dict[str, dict[str, Any]]:
    word = np.dtype(f"u{width}")
    src = np.arange(1, 21, dtype=word)
    two = {"bits": 2, "level": 2}
    return {
        "mask": {"src": src, "dst": np.zeros(20, word), **two},
        "count": {"src": src, "bits": 2, "out": np.zeros(4, np.int64)},
        "compact": {"src": src, **two, "bitmask": np.zeros(3, np.uint8), "values": src * 0},
        "csr": {
            "src": src,
            **two,
            "start": 5,
            "cols": 5,
            "kept": 1,
            "indptr": np.zeros(6, np.int32),
            "indices": np.zeros(20, np.int32),
            "values": np.zeros(20, word),
        },
        "expand": {
            "bitmask": np.array([0b111, 0, 0b1000], np.uint8),
            "values": np.arange(1, 5, dtype=word),
            "dst": np.zeros(20, word),
        },
        "expand_csr": {
            "indptr": np.array([0, 2, 2, 4], np.int64),
            "indices": np.array([0, 4, 1, 2]),
            "values": np.arange(1, 5, dtype=word),
            "cols": 5,
            "dst": np.zeros(15, word),
        },
        "embed": {
            "src": src,
            "counters": np.ones(20, np.uint8),
            "dst": np.zeros(20, word),
            "bits": 2,
            "inf": INF[width],
            "levels": 3,
            "nearest": True,
        },
        "find_unpackable": {
            "src": src,
            "counters": np.ones(20, np.uint8),
            "inf": INF[width],
            "levels": 3,
        },
        "nest": {
            "dense": src,
            "sparse": src * (src % word.type(3) == 0),
            "level": 2,
            "counters": np.zeros(20, np.uint8),
        },
        "histogram": {
            "src": src,
            "shift": 1,
            "width": 3,
            "prefixes": np.array([0, 1], np.uint64),
            "out": np.zeros((2, 8), np.uint64),
        },
        "assign": {
            "src": src,
            "thresholds": np.array([9, 5], np.uint64),
            "ties": np.array([1, 1]),
            "counters": np.zeros(20, np.uint8),
        },
    }


OUTPUTS = {
    "mask": ["dst"],
    "count": ["out"],
    "compact": ["bitmask", "values"],
    "csr": ["indptr", "indices", "values"],
    "expand": ["dst"],
    "expand_csr": ["dst"],
    "embed": ["dst"],
    "find_unpackable": [],
    "nest": ["counters"],
    "histogram": ["out"],
    "assign": ["ties", "counters"],
}
ARRAYS = [
    (name, key)
    for name, arguments in calls().items()
    for key, value in arguments.items()
    if isinstance(value, np.ndarray)
]


def refused(
    kernels: ModuleType, name: str, error: type[Exception] = ValueError, **spoilt: Any
) -> None:
    with pytest.raises(error):
        getattr(kernels, name)(**(calls()[name] | spoilt))


def test_every_kernel_is_covered() -> None:
    assert sorted(calls()) == sorted(NAMES) == sorted(OUTPUTS)
    for name, arguments in calls().items():
        assert list(inspect.signature(getattr(_pure, name)).parameters) == list(arguments)


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_arguments_by_position_and_by_name(kernels: ModuleType, name: str, width: int) -> None:
    one, other = calls(width)[name], calls(width)[name]
    kernel = getattr(kernels, name)
    assert kernel(**one) == kernel(*other.values())
    for key in OUTPUTS[name]:
        assert one[key].tolist() == other[key].tolist()


@each_implementation
@pytest.mark.parametrize(("name", "key"), ARRAYS)
def test_arrays_of_the_wrong_kind_are_refused(kernels: ModuleType, name: str, key: str) -> None:
    right = calls()[name][key]
    for wrong in (
        right.tolist(),
        right.astype(np.float32),
        right.astype(np.int8),
        right.astype(bool),
        right.astype(right.dtype.newbyteorder()) if right.itemsize > 1 else "text",
        None if key != "counters" else 3,
    ):
        refused(kernels, name, TypeError, **{key: wrong})
    strided = np.repeat(right, 2, axis=-1)[..., ::2]
    assert strided.tolist() == right.tolist()
    refused(kernels, name, **{key: strided})
    refused(kernels, name, **{key: right[None]})
    refused(kernels, name, **{key: right.reshape(-1)[:1].reshape(())})


@each_implementation
@pytest.mark.parametrize(("name", "key"), ARRAYS)
def test_one_element_more_or_less_is_refused(kernels: ModuleType, name: str, key: str) -> None:
    right = calls()[name][key]
    longer = np.resize(right, right.size + 1)
    spoilt = {
        "count.src": [],
        "histogram.src": [],
        "csr.src": [longer],
        "csr.indptr": [right[:-1], right[:0]],
        "csr.indices": [right[:3]],
        "csr.values": [right[:3]],
        "compact.src": [right[:-8], np.resize(right, 28)],
        "compact.values": [right[:3]],
        "expand.values": [right[:-1]],
        "expand.dst": [right[:-8], np.resize(right, 28)],
        "histogram.out": [np.zeros(shape, np.uint64) for shape in ((1, 8), (2, 7), (8, 2), (4, 4))],
    }.get(f"{name}.{key}", [right[:-1], longer])
    for array in spoilt:
        refused(kernels, name, **{key: array})


@each_implementation
@pytest.mark.parametrize(("name", "key"), [(n, k) for n, keys in OUTPUTS.items() for k in keys])
def test_read_only_and_overlapping_outputs_are_refused(
    kernels: ModuleType, name: str, key: str
) -> None:
    arguments = calls()[name]
    arguments[key].flags.writeable = False
    refused(kernels, name, **{key: arguments[key]})
    arguments = calls()[name]
    for other, array in arguments.items():
        if not isinstance(array, np.ndarray) or other == key:
            continue
        # One byte in common is enough.
        memory = np.zeros(array.nbytes + arguments[key].nbytes, np.uint8)
        first = memory[: array.nbytes].view(array.dtype).reshape(array.shape)
        first[...] = array
        begin = array.nbytes - 1
        second = memory[begin : begin + arguments[key].nbytes].view(arguments[key].dtype)
        refused(kernels, name, **{other: first, key: second.reshape(arguments[key].shape)})


@each_implementation
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [-1, 2**31, 2**63 - 1, 2**63, 2**64, -(2**63), -(2**70)])
def test_integers_out_of_range_are_refused(kernels: ModuleType, name: str, wrong: int) -> None:
    for key, value in calls()[name].items():
        if isinstance(value, int) and key not in ("nearest", "kept", "inf"):
            refused(kernels, name, **{key: wrong})
            refused(kernels, name, TypeError, **{key: 1.0})
    if "kept" in calls()[name]:
        refused(kernels, name, kept=wrong)
    if "inf" in calls()[name]:
        refused(kernels, name, inf=wrong)


@each_implementation
@pytest.mark.parametrize("name", ["mask", "count", "compact", "csr", "embed"])
def test_bits_and_levels_have_a_range(kernels: ModuleType, name: str) -> None:
    for bits in (0, 9, 64):
        refused(kernels, name, bits=bits)
    if "level" in calls()[name]:
        refused(kernels, name, level=0)
        refused(kernels, name, level=4)


@each_implementation
def test_partly_overlapping_source_is_refused_and_the_same_is_not(kernels: ModuleType) -> None:
    both = np.arange(21, dtype=np.uint32)
    refused(kernels, "mask", src=both[1:], dst=both[:-1])
    refused(kernels, "mask", src=both[:-1], dst=both[1:])
    kernels.mask(**(calls()["mask"] | {"src": both[1:], "dst": both[1:]}))


@each_implementation
def test_levels_fit_the_counter_bits(kernels: ModuleType) -> None:
    refused(kernels, "embed", levels=4)
    refused(kernels, "embed", levels=-1)
    counters = np.array([1] * 19 + [3], np.uint8)
    assert kernels.embed(**(calls()["embed"] | {"counters": counters, "levels": 3})) == -1
    assert kernels.embed(**(calls()["embed"] | {"counters": counters, "levels": 2})) == 19


@each_implementation
def test_csr_index_must_be_wide_enough(kernels: ModuleType) -> None:
    kernels.csr(**(calls()["csr"] | {"kept": 2**31 - 1 - 10}))
    refused(kernels, "csr", kept=2**31 - 1 - 9)
    refused(kernels, "csr", cols=2**31)


@each_implementation
@pytest.mark.parametrize(
    "spoilt",
    [
        {"indptr": [1, 2, 2, 4]},
        {"indptr": [0, 3, 2, 4]},
        {"indptr": [0, 5, 5, 4]},
        {"indptr": [0, -1, 2, 4]},
        {"indptr": [0, 2, 2, 3]},
        {"indptr": [0, 2, 2, 5]},
        {"indptr": [0, 2**40, 2, 4]},
        {"indices": [0, 5, 1, 2]},
        {"indices": [-1, 4, 1, 2]},
        {"indices": [0, 4, 1, 2**62]},
        {"indices": [0, 4, 1, -(2**63)]},
        {"indices": [0, 0, 1, 2]},
        {"indices": [4, 0, 1, 2]},
        {"indices": [0, 4, 2, 1]},
        {"cols": 4},
        {"cols": 6},
        {"cols": 0},
    ],
)
def test_damaged_csr_is_refused(kernels: ModuleType, spoilt: dict[str, Any]) -> None:
    refused(
        kernels, "expand_csr", **{k: np.array(v) if k != "cols" else v for k, v in spoilt.items()}
    )


@each_implementation
def test_bitmask_must_not_go_on_past_the_end(kernels: ModuleType) -> None:
    refused(kernels, "expand", bitmask=np.array([0b111, 0, 0b10000], np.uint8))


@each_implementation
def test_unordered_thresholds_and_prefixes_are_refused(kernels: ModuleType) -> None:
    refused(kernels, "assign", thresholds=np.array([5, 9], np.uint64))
    refused(kernels, "assign", thresholds=np.zeros(0, np.uint64), ties=np.zeros(0, np.int64))
    refused(kernels, "assign", thresholds=np.zeros(256, np.uint64), ties=np.zeros(256, np.int64))
    refused(kernels, "histogram", prefixes=np.array([1, 0], np.uint64))
    refused(kernels, "histogram", prefixes=np.array([1, 1], np.uint64))


@each_implementation
@pytest.mark.parametrize(("rows", "cols"), [(0, 5), (5, 0), (0, 0)])
def test_empty_matrices(kernels: ModuleType, rows: int, cols: int) -> None:
    nothing, index = np.zeros(0, np.uint32), np.zeros(0, np.int32)
    indptr = np.zeros(rows + 1, np.int32)
    assert kernels.csr(nothing, 2, 1, 0, cols, 0, indptr, index, nothing.copy()) == 0
    kernels.expand_csr(indptr, index, nothing, cols, nothing.copy())
    refused(kernels, "csr", start=0, cols=0, indptr=np.zeros(9, np.int32))


def weights(width: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Like a trained layer: normal weights, four in five of them zero, counters of three levels."""
    rng = np.random.default_rng(width)
    dense = rng.standard_normal(size)
    if width == 2:
        words = (dense.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    else:
        words = dense.astype(f"f{width}").view(f"u{width}")
    counters = np.digitize(rng.random(size), [0.8, 0.9, 0.95]).astype(np.uint8)
    counters[counters > 0] = 4 - counters[counters > 0]
    words[counters == 0] = 0
    return words, counters


ROWS, COLS = 373, 401  # more than a block of any implementation, and no multiple of a vector
SIZE = ROWS * COLS


@pytest.mark.skipif(NATIVE is None, reason="the C module is not built")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bits", [2, 8])
def test_both_agree_on_a_layer(width: int, bits: int) -> None:
    def both(call: Callable[[ModuleType], Any]) -> Any:
        one, other = call(_pure), call(NATIVE)
        assert [a.tobytes() for a in one] == [a.tobytes() for a in other]
        return other

    src, counters = weights(width, SIZE)
    absolute = (1 << (8 * width - 1)) - 1

    def embed(kernels: ModuleType) -> list[np.ndarray]:
        assert kernels.find_unpackable(src, counters, INF[width], 3) == -1
        spoilt = src.copy()
        spoilt[SIZE - 2 :] = INF[width]
        assert kernels.find_unpackable(spoilt, counters, INF[width], 3) == SIZE - 2
        dst = np.empty_like(src)
        assert kernels.embed(spoilt, counters, dst, bits, INF[width], 3, True) == SIZE - 2
        assert kernels.embed(src, counters, dst, bits, INF[width], 3, True) == -1
        return [dst]

    (packed,) = both(embed)

    def decode(kernels: ModuleType) -> list[np.ndarray]:
        tally = np.zeros(1 << bits, np.int64)
        kernels.count(packed, bits, tally)
        assert tally.tolist() == np.bincount(counters, minlength=1 << bits).tolist()
        kept = int(tally[1:3].sum())
        dense, again = np.empty_like(packed), np.empty_like(packed)
        bitmask, values = np.empty(-(-SIZE // 8), np.uint8), np.empty(kept, packed.dtype)
        kernels.mask(packed, dense, bits, 2)
        assert kernels.compact(packed, bits, 2, bitmask, values) == kept
        assert kernels.expand(bitmask, values, again) == kept
        assert (again == dense).all()
        outputs = [dense, bitmask, values]
        for cols in (1, COLS, SIZE):
            indptr, indices = np.zeros(SIZE // cols + 1, np.int32), np.empty(kept, np.int32)
            found = np.empty_like(values)
            assert kernels.csr(packed, bits, 2, 0, cols, 0, indptr, indices, found) == kept
            again[:] = 1
            kernels.expand_csr(indptr, indices, found, cols, again)
            assert (again == dense).all()
            outputs += [indptr, indices, found]
        return outputs

    both(decode)

    def select(kernels: ModuleType) -> list[np.ndarray]:
        top = 8 * width - 1
        first = np.zeros((1, 1 << 12), np.uint64)
        kernels.histogram(packed, top - 12, 12, np.zeros(1, np.uint64), first)
        assert first.sum() == SIZE
        prefixes = np.flatnonzero(first[0]).astype(np.uint64)
        second = np.zeros((prefixes.size, 1 << (top - 12 if width == 2 else 6)), np.uint64)
        digits = second.shape[1].bit_length() - 1
        kernels.histogram(packed, top - 12 - digits, digits, prefixes, second)
        assert second.sum() == SIZE
        keys = np.sort(packed & packed.dtype.type(absolute))[::-1]
        thresholds = keys[np.linspace(SIZE // 20, SIZE // 2, 40).astype(int)].astype(np.uint64)
        ties = np.arange(40)
        assigned = np.empty(SIZE, np.uint8)
        kernels.assign(packed, thresholds, ties, assigned)
        return [first, second, ties, assigned]

    both(select)


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
def test_every_length_at_every_room(kernels: ModuleType, width: int) -> None:
    word = np.dtype(f"u{width}")
    for size in range(70):
        src = (np.arange(size) % 4 + 4).astype(word)
        tally = np.zeros(4, np.int64)
        kernels.count(src, 2, tally)
        assert tally.tolist() == np.bincount(np.arange(size) % 4, minlength=4).tolist()
        kept = int(tally[1] + tally[2])
        expected = np.where((src % 4 > 0) & (src % 4 < 3), src, 0)
        # Exactly enough room, so that a sanitizer sees a word too many.
        bitmask, values = np.zeros(-(-size // 8), np.uint8), np.zeros(kept, word)
        assert kernels.compact(src, 2, 2, bitmask, values) == kept
        assert values.tolist() == expected[expected > 0].tolist()
        again = np.ones(size, word)
        assert kernels.expand(bitmask, values, again) == kept
        assert again.tolist() == expected.tolist()
        indptr, indices = np.zeros(2, np.int64), np.zeros(kept, np.int64)
        values[:] = 0
        assert kernels.csr(src, 2, 2, 0, size, 0, indptr, indices, values) == kept
        assert indices.tolist() == np.flatnonzero(expected).tolist()
        assert values.tolist() == expected[expected > 0].tolist()


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("at", [0, 511, 512, 999])
def test_the_only_unpackable_weight_is_found(kernels: ModuleType, width: int, at: int) -> None:
    def found(word: int, counter: int) -> int:
        src, counters = np.ones(1000, f"u{width}"), np.ones(1000, np.uint8)
        src[at], counters[at] = word, counter
        return int(kernels.find_unpackable(src, counters, INF[width], 3))

    sign = 1 << (8 * width - 1)
    assert found(INF[width], 0) == found(INF[width] | sign, 0) == at
    assert found(0, 1) == found(sign, 1) == at
    assert found(1, 4) == at
    assert found(0, 0) == found(sign, 0) == found(INF[width] - 1, 3) == -1


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
def test_mask_of_a_tensor_larger_than_the_cache(kernels: ModuleType, width: int) -> None:
    size = (33 << 20) // width + 3
    src = np.arange(size, dtype=f"u{width}")
    dst = np.full(size + 2, 7, src.dtype)
    kernels.mask(src, dst[1:-1], 3, 2)
    low = src & src.dtype.type(7)
    src[(low == 0) | (low > 2)] = 0
    assert (dst[1:-1] == src).all()
    assert dst[0] == dst[-1] == 7


def test_count_makes_its_result() -> None:
    src = np.array([0, 1, 2, 3, 3], np.uint32)
    assert _kernels.count(src, 2).tolist() == [1, 1, 1, 2]
