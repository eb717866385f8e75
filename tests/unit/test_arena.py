"""Memory to read into: aligned, distinct, and given back."""

import itertools
import threading

import numpy as np
import pytest
from internals import ARENA, LARGE, LINE, Arena, _memory, give_block, take_block
from internals import MEMORY_BLOCK as BLOCK


def span(array: np.ndarray) -> tuple[int, int]:
    return array.ctypes.data, array.ctypes.data + array.nbytes


@pytest.mark.parametrize("threads", [1, 4])
def test_arrays_of_an_arena_are_aligned_and_apart(threads: int) -> None:
    rng = np.random.default_rng(0)
    sizes = [0, 1, LINE, LARGE - 1, LARGE, LARGE + 1, *rng.integers(0, 1 << 20, 200).tolist()]
    arena, taken = Arena(sum(sizes) * threads), []

    def take() -> None:
        for size in sizes:
            taken.append(arena.empty(size))

    workers = [threading.Thread(target=take) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(array.nbytes for array in taken) == sorted(sizes * threads)
    assert all(array.ctypes.data % LINE == 0 for array in taken if array.nbytes)
    spans = sorted(span(array) for array in taken if array.nbytes)
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))


def test_an_array_keeps_no_more_than_an_arena() -> None:
    small = Arena(1 << 40).empty(100)
    assert small.base is not None
    assert small.base.nbytes <= ARENA + LINE
    alone = Arena(100).empty(100)
    assert alone.base is not None
    assert alone.base.nbytes < 300


def test_blocks_are_used_again() -> None:
    block = take_block()
    other = take_block()
    assert block.nbytes == BLOCK
    assert span(block)[1] <= span(other)[0] or span(other)[1] <= span(block)[0]
    give_block(block)
    assert take_block() is block


def test_blocks_of_other_sizes_and_too_many_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "_FREE", [])
    give_block(np.empty(BLOCK // 2, np.uint8))
    for _ in range(20):
        give_block(np.empty(BLOCK, np.uint8))
    assert len(_memory._FREE) == _memory.SPARE
