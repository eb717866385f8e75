"""What extracting a level will write, from the header alone (spec §9)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elsa_format import _level_file
from elsa_format._header import Header, TensorInfo, lay_out, serialize
from elsa_format._layouts import Layout, parts
from elsa_format._profile import KEY, RESERVED, Profile


@dataclass(frozen=True)
class Step:
    """What becomes of one stored tensor when a level is extracted."""

    info: TensorInfo
    name: str | None
    """Its name in the level, or None if the level does not use it."""
    nested: bool


def plan(header: Header, profile: Profile, level: int | None) -> list[Step]:
    """The way from stored tensors to a level's, in stored order; None is the dense network."""
    names = {profile.stored_name(name, level): name for name in plain_names(header)}
    return [
        Step(info, names.get(stored), level is not None and stored in profile.nested)
        for stored, info in header.tensors.items()
    ]


def plain_names(header: Header) -> list[str]:
    """The tensors a level consists of, in stored order."""
    return [name for name in header.tensors if not name.startswith(RESERVED)]


def level_tensors(
    header: Header, profile: Profile, level: int | None, layout: Layout
) -> dict[str, TensorInfo]:
    """The tensors of a level file, each in its place, from the header alone."""
    infos: list[TensorInfo] = []
    for step in plan(header, profile, level):
        if step.name is None:
            continue
        info = replace(step.info, name=step.name)
        if step.nested and level is not None:
            kept = profile.nested[step.name][level - 1]
            infos += parts(layout, step.name, info.dtype, info.shape, kept)
        else:
            infos.append(info)
    # Dense tensors keep the order they arrive in, so that a pipe needs no memory of them.
    return _in_order(infos) if layout == "dense" else lay_out(infos)


def level_header(
    header: Header, profile: Profile, level: int | None, layout: Layout
) -> tuple[bytes, dict[str, TensorInfo]]:
    """The bytes before the data of a level file, and where its tensors go."""
    own = (KEY, _level_file.KEY)
    metadata = {k: v for k, v in header.metadata.items() if k not in own}
    if level is not None:
        nested = {name: header.tensors[name] for name in profile.nested}
        metadata[_level_file.KEY] = _level_file.describe(profile, level, layout, nested)
    placed = level_tensors(header, profile, level, layout)
    return serialize(placed, metadata), placed


def level_size(header: Header, profile: Profile, level: int | None, layout: Layout) -> int:
    """Bytes of the file that `extract` would write, from the header alone."""
    prefix, placed = level_header(header, profile, level, layout)
    return len(prefix) + sum(info.nbytes for info in placed.values())


def _in_order(infos: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    placed, position = {}, 0
    for info in infos:
        placed[info.name] = replace(info, start=position)
        position += info.nbytes
    return placed
