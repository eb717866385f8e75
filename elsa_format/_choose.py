"""Pick the level for a device: by number, by sparsity, or by the size it may have."""

from fractions import Fraction

from elsa_format._errors import NoLevelGiven, NoSuchLevel
from elsa_format._layouts import LAYOUTS, Layout
from elsa_format._level_header import LevelSizes
from elsa_format._network import Network
from elsa_format._options import one_of, whole
from elsa_format._profile import LevelLike
from elsa_format.levels import Sparsity, parse_sparsity

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
) -> int | None:
    """The level asked for, None for the dense network.

    By sparsity (percent, or a fraction below 1): the densest level with at least that many zeros.
    By size: the densest level whose file, in this layout, is not larger.
    """
    one_of("layout", layout, LAYOUTS)
    wishes = sum(wish is not None for wish in (level, sparsity, max_size))
    only = network.only_level()
    if wishes > 1:
        raise TypeError("give exactly one of level, sparsity, max_size")
    if wishes == 0:
        if only is None:
            count = len(network.profile.levels)
            raise NoLevelGiven(f"{network.name}: holds {count} levels", _CHOOSE)
        return only
    if level is not None:
        return network.level_number(level)
    if sparsity is not None:
        return _sparse_enough(network, sparsity)
    return _small_enough(network, whole("max_size", max_size, low=0), layout)


def _sparse_enough(network: Network, sparsity: Sparsity) -> int:
    parsed = parse_sparsity(sparsity)
    wanted = float(parsed if isinstance(parsed, Fraction) else parsed.sparsity)
    found = {t: _sparsity(network, t) for t in range(len(network.profile.levels), 0, -1)}
    for t, zeros in found.items():
        if zeros is not None and zeros >= wanted - TOLERANCE:
            return t
    if found[1] is None:
        raise NoSuchLevel(f"{network.name}: does not tell how sparse its level is", "give {level}")
    raise NoSuchLevel(
        f"{network.name}: no level is {wanted:.4%} sparse; the sparsest has {found[1]:.4%}"
    )


def _sparsity(network: Network, level: int) -> float | None:
    """The fraction of nested weights that a level zeroes: as asked for, else as counted."""
    target = network.profile.levels[level - 1].target
    return network.sparsity(level) if target is None else target


def _small_enough(network: Network, max_size: int, layout: Layout) -> int | None:
    sizes = LevelSizes(network)
    if layout == "dense" and sizes.size(None, "dense") <= max_size:
        return None
    for t in range(len(network.profile.levels), 0, -1):
        if sizes.size(t, layout) <= max_size:
            return t
    smallest = ", ".join(f"{sizes.size(1, name)} as {name}" for name in LAYOUTS)
    raise NoSuchLevel(
        f"{network.name}: no level fits {max_size} bytes as {layout}; "
        f"level {network.stated(1)} takes {smallest}"
    )


def check_layout(network: Network, level: int | None, layout: Layout) -> None:
    """Refuse a sparse layout of the dense network."""
    if one_of("layout", layout, LAYOUTS) != "dense" and level is None:
        raise NoSuchLevel(
            f"{network.name}: the dense network has no layout {layout}, "
            f"expected a level 1..{len(network.profile.levels)}"
        )
