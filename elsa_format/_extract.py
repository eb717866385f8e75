"""Extract a level in one pass and constant memory (spec §2.2)."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from elsa_format import _level_file
from elsa_format._blocks import (
    BlockReader,
    OpenSource,
    Progress,
    Source,
    Track,
    ignore,
    open_source,
    read_profile,
    tracks,
)
from elsa_format._choose import check_layout, choose_level
from elsa_format._errors import NoSuchLevel
from elsa_format._header import Header, TensorInfo
from elsa_format._index import index_bytes, is_index
from elsa_format._json import parse_document
from elsa_format._kernels import mask
from elsa_format._layouts import Layout, Piece, encoder, nested_at, parts
from elsa_format._level_file import KEY as LEVEL_KEY
from elsa_format._options import whole
from elsa_format._output import Output, Target, is_special
from elsa_format._plan import Step, level_header, plain_names, plan
from elsa_format._profile import KEY, LevelLike, LevelNumber, Profile, variant_name
from elsa_format._shard_output import check_shard_size, group_tensors, open_destination
from elsa_format._threads import Meter
from elsa_format._writer import LevelSpec, open_writers
from elsa_format.levels import Sparsity


def extract(
    source: Source,
    target: Target,
    *,
    level: LevelLike | None = None,
    sparsity: Sparsity | None = None,
    max_size: int | None = None,
    layout: Layout = "dense",
    keep_levels: bool = False,
    verify: bool = True,
    max_shard_size: int | None = None,
    jobs: int = 1,
    force: bool = False,
    progress: Progress = ignore,
) -> LevelNumber:
    """Write one level of an ELSA file as a checkpoint of its own; returns which.

    The level is given by number or name, or as the densest with at least a `sparsity` (percent, or
    a fraction below 1), or as the densest whose file has at most `max_size` bytes. Source and
    target are paths or binary streams; neither needs to seek. The source may be a URL too. With
    `keep_levels` the output stays an ELSA file that holds levels 1..level; it has no layout but
    dense. Checksums are compared unless `verify` is false, and on any error a file target is left
    as it was.

    A target that ends in `.index.json` is written in shards, those of the source or, given
    `max_shard_size`, as many as it takes; `jobs` shards of the source are read at a time.

    >>> extract("net.safetensors", "level2.safetensors", level=2)
    2
    >>> extract("net.safetensors", "small.safetensors", max_size=5000, layout="bitmask")
    1
    """
    check_shard_size(target, max_shard_size)
    jobs = whole("jobs", jobs, low=1)
    if keep_levels and (layout != "dense" or max_size is not None):
        raise TypeError("keep_levels goes with the dense layout, and with level or sparsity")
    with open_source(source) as opened:
        header, profile = read_profile(opened)
        number = choose_level(
            header,
            profile,
            opened.name,
            level=level,
            sparsity=sparsity,
            max_size=max_size,
            layout=layout,
        )
        check_layout(profile, number, layout, opened.name)
        if number is None and keep_levels:
            raise NoSuchLevel(
                f"{opened.name}: the dense network has no levels to keep, "
                f"expected a level 1..{len(profile.levels)}"
            )
        meter = Meter(progress, header.data_size)
        job = _Job(
            header,
            profile,
            number,
            layout,
            tracks(opened, header, profile if verify else None, meter),
            partial(meter.run, jobs=jobs if _takes_any_order(target) else 1),
        )
        groups = [plain_names(header)]
        if is_index(target):
            groups = job.groups(opened, max_shard_size, keep_levels=keep_levels)
        if keep_levels and number is not None:
            job.keep_levels(groups, target, number, force=force)
        else:
            job.extract(groups, target, force=force)
        return "dense" if number is None else number


def _takes_any_order(target: Target) -> bool:
    """Whether several threads may write at once: to a new file, not to a stream or device."""
    return isinstance(target, str | os.PathLike) and not is_special(target)


@dataclass
class _Place:
    """Where the next bytes of a tensor go."""

    output: Output
    position: int

    def write(self, piece: NDArray[Any]) -> None:
        self.output.write_at(self.position, piece)
        self.position += piece.nbytes


@dataclass(frozen=True)
class _Job:
    """A level to be extracted."""

    header: Header
    profile: Profile
    level: int | None
    layout: Layout
    tracks: list[Track]
    run: Callable[[Callable[[Track], None], list[Track]], object]

    def groups(
        self, source: OpenSource, max_size: int | None, *, keep_levels: bool
    ) -> list[list[str]]:
        """The tensors of each shard to be written."""
        sizes = {name: self._size(name, keep_levels) for name in plain_names(self.header)}
        files = [shard.header for shard in source.shards.shards] if source.shards else [self.header]
        return group_tensors(sizes, [plain_names(file) for file in files], max_size)

    def _size(self, name: str, keep_levels: bool) -> int:
        info = self.header.tensors[name]
        if self.level is not None and keep_levels:
            return info.nbytes * (1 + self.level if name in self.profile.varying else 1)
        if self.level is None or name not in self.profile.nested:
            return info.nbytes
        kept = self.profile.nested[name][self.level - 1]
        stored = parts(self.layout, name, info.dtype, info.shape, kept)
        return sum(part.nbytes for part in stored)

    def extract(self, groups: list[list[str]], target: Target, *, force: bool) -> None:
        """Write the level as a plain checkpoint."""
        in_order = self.layout == "dense"
        with open_destination(target, len(groups), force=force, in_order=in_order) as destination:
            places: dict[str, _Place] = {}
            files = []
            for number, (output, names) in enumerate(
                zip(destination.outputs, groups, strict=True), 1
            ):
                part = (self.header, self.profile)
                if destination.sharded:
                    part = self._part(names, (number, len(groups)))
                prefix, placed = level_header(*part, self.level, self.layout)
                output.write_at(0, prefix)
                for name, info in placed.items():
                    places[name] = _Place(output, len(prefix) + info.start)
                files.append(placed.values())
            steps = {step.info.name: step for step in plan(self.header, self.profile, self.level)}

            def copy(track: Track) -> None:
                with track.open() as reader:
                    for info in track.tensors:
                        for name, piece in self._pieces(reader, steps[info.name]):
                            places[name].write(piece)
                    reader.finish()

            self.run(copy, self.tracks)
            index = b""
            if destination.sharded:
                index = index_bytes(destination.names, files, self._index_metadata())
            destination.commit(index)

    def _part(self, names: list[str], shard: tuple[int, int]) -> tuple[Header, Profile]:
        """The header and profile as far as they are about some of the tensors."""
        here, profile = set(names), self.profile
        varying = tuple(name for name in profile.per_level if name in here)
        numbers = range(1, len(profile.levels) + 1)
        here |= {variant_name(name, t) for name in varying for t in numbers}
        tensors = {name: info for name, info in self.header.tensors.items() if name in here}
        nested = {name: counts for name, counts in profile.nested.items() if name in here}
        return (
            replace(self.header, tensors=tensors),
            replace(profile, nested=nested, per_level=varying, shard=shard),
        )

    def _index_metadata(self) -> dict[str, Any]:
        """What the shards of a level cannot say by themselves: the digest of the whole."""
        if self.level is None:
            return {}
        described = _level_file.describe(self.profile, self.level, self.layout, {})
        document = parse_document(described, _level_file.KEY)
        del document["tensors"]
        return {_level_file.KEY: document}

    def _pieces(self, reader: BlockReader, step: Step) -> Iterator[Piece]:
        """What one stored tensor contributes to the level file."""
        if step.name is None:
            reader.skip(step.info)
            return
        blocks = reader.blocks(step.info)
        if self.level is None or not step.nested:
            for block in blocks:
                yield step.name, block
        else:
            tensor = nested_at(self.profile, step.info, self.level, reader.source.name)
            encode = encoder(self.layout, tensor)
            for block in blocks:
                yield from encode.encode(block.view(step.info.dtype.words))
            yield from encode.finish()

    def keep_levels(
        self, groups: list[list[str]], target: Target, level: int, *, force: bool
    ) -> None:
        """Cut the file down to its first levels; level `level` becomes the dense network."""
        header, profile = self.header, self.profile
        copies: dict[str, list[str]] = {}
        for name in plain_names(header):
            copies[profile.stored_name(name, level)] = [name]
        for name in profile.per_level:
            for t in range(1, level + 1):
                copies.setdefault(variant_name(name, t), []).append(variant_name(name, t))
        group_of = {name: number for number, names in enumerate(groups) for name in names}
        for name in profile.per_level:
            group_of |= {variant_name(name, t): group_of[name] for t in range(1, level + 1)}
        infos: list[list[TensorInfo]] = [[] for _ in groups]
        for stored, info in header.tensors.items():
            for name in copies.get(stored, ()):
                infos[group_of[name]].append(replace(info, name=name))
        with open_writers(
            target,
            infos,
            bits=profile.bits,
            levels=[
                LevelSpec(entry.name, entry.target, entry.pattern, entry.metrics)
                for entry in profile.levels[:level]
            ],
            nested=profile.nested,
            per_level=profile.per_level,
            metadata={k: v for k, v in header.metadata.items() if k not in (KEY, LEVEL_KEY)},
            dense_metrics=profile.levels[level - 1].metrics,
            digests=any(entry.digest for entry in profile.levels),
            force=force,
        ) as writers:

            def copy(track: Track) -> None:
                with track.open() as reader:
                    for info in track.tensors:
                        for block in reader.blocks(info):
                            if info.name in profile.nested:
                                words = block.view(info.dtype.words)
                                mask(words, words, profile.bits, level)
                            for name in copies.get(info.name, ()):
                                writers.append(name, block)
                    reader.finish()

            self.run(copy, self.tracks)
            writers.finish()
