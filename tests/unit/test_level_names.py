"""A level is given by number or by name, in one way everywhere."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bits import same_bits
from internals import find_level

import elsa_format as elsa

NAMES = ["1:8", "2", "large", "7", "twice", "twice"]


@pytest.mark.parametrize(
    ("level", "number"),
    [
        (1, 1),
        ("1", 1),
        ("1:8", 1),
        ("2", 2),
        ("3", 3),  # the number, whatever is called so
        ("large", 3),
        ("7", 4),  # no such number, so the name
        (np.int8(4), 4),
        (np.uint64(4), 4),
        (np.array(4), 4),
        ("dense", "dense"),
    ],
)
def test_found(level: Any, number: int | str) -> None:
    assert find_level(level, NAMES) == number


NO_NAMES = [0, -1, 7, "0", "-1", "8", "", "Large", "1.0", "９", "9" * 5000, 10**30]
NO_LEVELS = [1.0, 2.5, True, False, None, b"large", np.True_, np.float32(1), [1], (1,)]


@pytest.mark.parametrize("level", [*NO_NAMES, *NO_LEVELS])
def test_not_found(level: Any) -> None:
    expected = r"expected 1\.\.6, 'dense' or a name: 1:8, 2, large"
    with pytest.raises(elsa.NoSuchLevel, match=expected):
        find_level(level, NAMES)


def test_a_name_of_two_levels_is_none() -> None:
    with pytest.raises(elsa.NoSuchLevel, match=r"net: levels \[5, 6\] are called 'twice'"):
        find_level("twice", NAMES, "net")


def test_many_names_are_not_all_listed() -> None:
    with pytest.raises(elsa.NoSuchLevel, match=r"level 10, …$"):
        find_level("x", [f"level {t}" for t in range(1, 256)])


def test_every_way_to_a_level_takes_names(rich: Path, tmp_path: Path) -> None:
    with elsa.open(rich) as file:
        for level in ("90%", "2", np.int64(2)):
            assert same_bits(file.load(level), file.load(2))
            assert file.sparsity(level) == file.sparsity(2)
            assert file.size(level, "csr") == file.size(2, "csr")
            assert file.tensor("bn/mean", level).tobytes() == file.tensor("bn/mean", 2).tobytes()
            assert same_bits(dict(elsa.stream(rich, level=level)), file.load(2))
            assert elsa.extract(rich, tmp_path / "level", level=level, force=True) == 2
            assert same_bits(elsa.load_level(tmp_path / "level"), file.load(2))
        with pytest.raises(elsa.NoSuchLevel, match="a name: 95%, 90%, 80%"):
            file.load("85%")
