"""Tensors that a level leaves next to nothing of: it may be no network any more."""

from collections.abc import Mapping, Sequence

SHARE = 10
"""A tensor is starved that has less than this part of the level's density."""


def starved_notes(
    kept: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
    levels: Sequence[str],
    *,
    advice: str = "",
) -> tuple[str, ...]:
    """What to tell about each level, and what helps.

    >>> starved_notes({"wide": [10], "deep": [0]}, {"wide": 50, "deep": 50}, ["90%"])
    ("level 90% keeps no weight of 1 of 2 tensors ('deep')",)

    Args:
        kept: How many weights each level keeps of every nested tensor.
        sizes: How many weights the tensors have.
        levels: The names of the levels.
        advice: What follows each note.
    """
    notes = []
    total = sum(sizes[name] for name in kept)
    for t, level in enumerate(levels):
        mean = sum(counts[t] for counts in kept.values())
        filled = [name for name in kept if sizes[name]]
        empty = [name for name in filled if not kept[name][t]]
        # As whole numbers: kept / size < mean / total / SHARE.
        thin = [n for n in filled if 0 < kept[n][t] * total * SHARE < mean * sizes[n]]
        for names, what in ((empty, "keeps no weight"), (thin, "keeps less than a tenth as much")):
            if names:
                notes.append(
                    f"level {level} {what} of {len(names)} of {len(filled)} tensors "
                    f"({names[0]!r}{', …' if len(names) > 1 else ''}){advice}"
                )
    return tuple(notes)
