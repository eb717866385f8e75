"""Pick the level for a device: by number, by sparsity, or by the size it may have."""

from fractions import Fraction

from elsa_format._errors import NoSuchLevel
from elsa_format._header import Header
from elsa_format._layouts import LAYOUTS, Layout
from elsa_format._options import one_of, whole
from elsa_format._plan import LevelSizes
from elsa_format._profile import LevelLike, Profile
from elsa_format.levels import Sparsity, parse_sparsity

TOLERANCE = 5e-4
"""A level made for 90 % keeps whole weights, so its sparsity may fall short by a rounding."""


def choose_level(
    header: Header,
    profile: Profile,
    where: str,
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
    if sum(wish is not None for wish in (level, sparsity, max_size)) != 1:
        raise TypeError("give exactly one of level, sparsity, max_size")
    if level is not None:
        return profile.level_number(level, where)
    numbers = range(len(profile.levels), 0, -1)
    if sparsity is not None:
        parsed = parse_sparsity(sparsity)
        wanted = float(parsed if isinstance(parsed, Fraction) else parsed.sparsity)
        found = {t: level_sparsity(header, profile, t) for t in numbers}
        for t in numbers:
            if found[t] >= wanted - TOLERANCE:
                return t
        raise NoSuchLevel(
            f"{where}: no level is {wanted:.4%} sparse; the sparsest has {found[1]:.4%}"
        )
    max_size = whole("max_size", max_size, low=0)
    sizes = LevelSizes(header, profile)
    if layout == "dense" and sizes.size(None, "dense") <= max_size:
        return None
    for t in numbers:
        if sizes.size(t, layout) <= max_size:
            return t
    smallest = ", ".join(f"{sizes.size(1, name)} as {name}" for name in LAYOUTS)
    raise NoSuchLevel(
        f"{where}: no level fits {max_size} bytes as {layout}; level 1 takes {smallest}"
    )


def check_layout(profile: Profile, level: int | None, layout: Layout, where: str) -> None:
    """Refuse a sparse layout of the dense network."""
    if one_of("layout", layout, LAYOUTS) != "dense" and level is None:
        raise NoSuchLevel(
            f"{where}: the dense network has no layout {layout}, "
            f"expected a level 1..{len(profile.levels)}"
        )


def level_sparsity(header: Header, profile: Profile, level: int) -> float:
    """The fraction of nested weights that a level zeroes: as asked for, else as counted."""
    entry = profile.levels[level - 1]
    if entry.target is not None:
        return entry.target
    total = sum(header.tensors[name].elements for name in profile.nested)
    return 1 - entry.nonzero / total if total else 0.0
