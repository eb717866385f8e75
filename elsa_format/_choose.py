"""Pick the level for a device: by number, by sparsity, or by the size it may have."""

from elsa_format._errors import NoLevelGiven, NoSuchLevel
from elsa_format._layouts import LAYOUTS, Layout
from elsa_format._level_header import LevelSizes
from elsa_format._network import Network
from elsa_format._options import check_int, one_of
from elsa_format._profile import Level, LevelLike, LevelNumber
from elsa_format.levels import Sparsity, zeros_of

TOLERANCE = 5e-4
"""A level made for 90 % keeps whole weights, so its sparsity may fall short by a rounding."""


_CHOOSE = "give one of {level}, {sparsity} and {max_size}"


def choose_level(
    network: Network,
    *,
    level: LevelLike | None = None,
    sparsity: Sparsity | None = None,
    max_size: int | None = None,
    layout: Layout = "dense",
) -> LevelNumber:
    """The level asked for, or "dense".

    By sparsity (percent, a fraction below 1, or N:M): the densest level with at least that many
    zeros.
    By size: the densest level whose file, in this layout, is not larger.
    """
    one_of("layout", layout, LAYOUTS)
    wishes = sum(wish is not None for wish in (level, sparsity, max_size))
    if wishes > 1:
        raise TypeError("give exactly one of level, sparsity, max_size")
    if wishes == 0:
        if len(network.levels) > 1:
            count = len(network.profile.levels)
            raise NoLevelGiven(f"{network.name}: holds {count} levels", _CHOOSE)
        return network.levels[0]
    if level is not None:
        return network.level_number(level)
    if sparsity is not None:
        return _sparse_enough(network, sparsity)
    return _small_enough(network, check_int("max_size", max_size, low=0), layout)


def _sparse_enough(network: Network, sparsity: Sparsity) -> int:
    wanted = float(zeros_of(sparsity))
    levels = network.profile.levels
    found = [_sparsity(network, level) for level in levels]
    for level, zeros in zip(reversed(levels), reversed(found), strict=True):
        if zeros is not None and zeros >= wanted - TOLERANCE:
            return level.number
    if found[0] is None:
        raise NoSuchLevel(f"{network.name}: does not tell how sparse its level is", "give {level}")
    raise NoSuchLevel(
        f"{network.name}: no level is {wanted:.4%} sparse; the sparsest has {found[0]:.4%}"
    )


def _sparsity(network: Network, level: Level) -> float | None:
    """The fraction of nested weights that a level zeroes: as asked for, else as counted."""
    return network.sparsity(level.number) if level.target is None else level.target


def _small_enough(network: Network, max_size: int, layout: Layout) -> LevelNumber:
    sizes, numbers = LevelSizes(network), [level.number for level in network.profile.levels]
    dense = layout == "dense" and "dense" in network.levels
    if dense and sizes.size("dense", "dense") <= max_size:
        return "dense"
    for number in reversed(numbers):
        if sizes.size(number, layout) <= max_size:
            return number
    smallest = ", ".join(f"{sizes.size(numbers[0], name)} as {name}" for name in LAYOUTS)
    raise NoSuchLevel(
        f"{network.name}: no level fits {max_size} bytes as {layout}; "
        f"level {numbers[0]} takes {smallest}"
    )


def check_layout(network: Network, level: LevelNumber, layout: Layout) -> None:
    """Refuse a sparse layout of the dense network."""
    if one_of("layout", layout, LAYOUTS) != "dense" and level == "dense":
        raise NoSuchLevel(
            f"{network.name}: the dense network has no layout {layout}, "
            f"expected a level 1..{len(network.profile.levels)}"
        )
