"""Extract a level in one pass and constant memory (spec §2.2)."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from elsa_format._choose import LevelChoice, Metrics, check_layout, choose_level
from elsa_format._container import TensorInfo
from elsa_format._container.index import is_index, is_url
from elsa_format._destination import check_shard_size, group_tensors, in_directory, open_destination
from elsa_format._errors import InvalidOption
from elsa_format._kernels import mask
from elsa_format._layouts import LAYOUTS, LayoutName, Piece
from elsa_format._level_header import describe_level, level_header
from elsa_format._level_reader import LevelReader, Proof, copy_data, counted
from elsa_format._network import Network, open_network
from elsa_format._network.level import KEY
from elsa_format._options import check_int, renamed
from elsa_format._output import Output, Target, names_file
from elsa_format._profile import LevelLike, LevelNumber, variant_name
from elsa_format._storage import Source
from elsa_format._threads import Meter, Progress, no_progress
from elsa_format._writer import Contents, open_writer
from elsa_format.levels import Sparsity


def extract(
    source: Source,
    target: Target,
    *,
    level: LevelLike | None = None,
    sparsity: Sparsity | None = None,
    max_size: int | None = None,
    min: Metrics | None = None,
    max: Metrics | None = None,
    layout: LayoutName = "dense",
    keep_levels: bool = False,
    restore: bool = False,
    verify: bool = True,
    max_shard_size: int | None = None,
    jobs: int = 1,
    max_bytes: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
    whole: bool | None = None,
) -> LevelNumber:
    """Write one level of an ELSA file as a checkpoint of its own; returns which.

    Of a level file, whose level need not be named, it is the way to another layout.

    The level is given by number or name, or as the densest with at least a `sparsity` (percent, a
    fraction below 1, or N:M), or as the densest whose file has at most `max_size` bytes, or as the
    sparsest whose metrics are at least those of `min`, such as `{"accuracy": 0.9}`, and at most
    those of `max`; with `max_size`, as the best of these that is small enough. Source and target
    are paths, URLs or binary streams; neither needs to seek. With `keep_levels` the output stays an
    ELSA file that holds levels 1..level; it has no layout but dense. A network of more than
    `max_bytes` is refused. Checksums are compared unless `verify` is false, and on any error a
    target that is a file, here or in a store, is left as it was.

    With `restore` (`whole` in earlier releases), the ELSA file of which a delivery file was made
    comes back byte for byte, and it returns "dense".

    A model directory gives a directory, unless the target ends in `.safetensors`: config and
    tokenizer are copied, and a sparse layout is told by the weights' name, such as
    `model.bitmask.safetensors`. A target that ends in `.index.json` is written in shards, those of
    the source or, given `max_shard_size`, as many as it takes; `jobs` shards of the source are read
    at a time.

    >>> extract("net.safetensors", "level2.safetensors", level=2)
    2
    >>> extract("net.safetensors", "small.safetensors", max_size=5000, layout="bitmask")
    1
    """
    variant, sharded = None if layout == "dense" else layout, max_shard_size is not None
    target = in_directory(source, target, variant=variant, sharded=sharded)
    check_shard_size(target, max_shard_size)
    jobs = check_int("jobs", jobs, low=1)
    if whole is not None:
        renamed("whole=", "restore=")
        restore = whole
    choice = LevelChoice(level=level, sparsity=sparsity, max_size=max_size, min=min, max=max)
    if restore:
        if choice.given or max_shard_size is not None:
            raise TypeError("restore goes with no level, sparsity, max_size or max_shard_size")
        if keep_levels or layout != "dense":
            raise TypeError("restore goes with the dense layout, and without keep_levels")
        with open_network(source, sequential=True, max_bytes=max_bytes) as network:
            restore_files(network, target, force=force, progress=progress)
        return "dense"
    if keep_levels and (layout != "dense" or max_size is not None):
        raise TypeError("keep_levels goes with the dense layout, and with level or sparsity")
    with open_network(source, sequential=True, max_bytes=max_bytes) as network:
        if layout != "dense" or sparsity is not None:
            network = counted(network)
        number = choose_level(network, choice, layout=layout)
        check_layout(network, number, layout)
        several = names_file(target) and not is_url(os.fspath(target))
        meter, proof = Meter(progress, network.header.data_size), Proof(network, verify=verify)
        job = _Job(network, number, layout, verify, meter, proof)
        groups = [list(network.tensors)]
        if is_index(target):
            sizes = {name: job.size(name, keep_levels) for name in network.tensors}
            groups = group_tensors(sizes, network.groups, max_shard_size)
        writing = job.as_network if keep_levels else job.as_checkpoint
        with writing(groups, target, force=force) as copy:
            network.need(number)
            meter.run(copy, network.files, jobs if several else 1)
            proof.finish()
        return number


def restore_files(network: Network, target: Target, *, force: bool, progress: Progress) -> None:
    """Write the file, or the shards, that delivery files were made of, byte for byte."""
    files = network.files
    if network not in files and not is_index(target):
        raise InvalidOption("the original of an index is an index")
    starts = [file.original_start for file in files]
    network.need("dense")
    meter = Meter(progress, network.header.data_size)
    in_order = len(files) == 1
    with open_destination(target, len(files), force=force, in_order=in_order) as destination:
        for file, start, output in zip(files, starts, destination.weights, strict=True):
            copy_data(file, start, output, meter.tick)
        tensors = [file.header.tensors.values() for file in files]
        destination.finish(tensors, network.extra_metadata, progress)


@dataclass(frozen=True)
class _Job:
    """A level to be extracted."""

    network: Network
    level: LevelNumber
    layout: LayoutName
    verify: bool
    meter: Meter
    proof: Proof

    def size(self, name: str, keep_levels: bool) -> int:
        """Bytes that a tensor will take."""
        network, info = self.network, self.network.tensors[name]
        nested = network.mask(info, self.level)
        if self.level != "dense" and keep_levels:
            return info.nbytes * (1 + self.level if name in network.profile.varying else 1)
        if nested is None:
            return info.nbytes
        return sum(part.nbytes for part in LAYOUTS[self.layout].parts(info, nested.expected))

    def _reader(self, file: Network) -> LevelReader:
        """Reads one of the files; when all are read, the proof is to be finished."""
        verify, on_bytes = self.verify, self.meter.tick
        return LevelReader(file, self.level, verify=verify, proof=self.proof, on_bytes=on_bytes)

    @contextlib.contextmanager
    def as_checkpoint(
        self, groups: list[list[str]], target: Target, *, force: bool
    ) -> Iterator[Callable[[Network], None]]:
        """What copies the level out of each file, into a plain checkpoint."""
        in_order = self.layout == "dense"
        with open_destination(target, len(groups), force=force, in_order=in_order) as destination:
            places: dict[str, tuple[Output, int]] = {}
            files = []
            for number, output in enumerate(destination.weights):
                names = frozenset(groups[number]) if destination.index else None
                prefix, placed = level_header(self.network, self.level, self.layout, names)
                output.write_at(0, prefix)
                for name, info in placed.items():
                    places[name] = output, len(prefix) + info.start
                files.append(placed.values())

            def write(pieces: Iterable[Piece]) -> None:
                for name, piece in pieces:
                    output, position = places[name]
                    output.write_at(position, piece)
                    places[name] = output, position + piece.nbytes

            def copy(file: Network) -> None:
                with self._reader(file) as reader:
                    for planned in reader.tensors():
                        info, name, mask = planned.info, planned.name, planned.mask
                        encoder = LAYOUTS[self.layout].encoder(mask) if mask else None
                        for block in reader.blocks(info):
                            if encoder:
                                write(encoder.encode(block.view(info.dtype.words)))
                            elif name is not None:
                                write([(name, block)])
                        if encoder:
                            write(encoder.finish())

            yield copy
            extra = self._index_metadata() if destination.index else {}
            destination.finish(files, extra, self.meter.progress)

    def _index_metadata(self) -> dict[str, Any]:
        """What the shards of a level cannot say by themselves, as the digest of the whole."""
        if self.level == "dense":
            return dict(self.network.extra_metadata)
        document = describe_level(self.network, self.level, self.layout, {})
        del document["tensors"]
        return {**self.network.extra_metadata, KEY: document}

    @contextlib.contextmanager
    def as_network(
        self, groups: list[list[str]], target: Target, *, force: bool
    ) -> Iterator[Callable[[Network], None]]:
        """What copies the first levels; the last of them becomes the dense network."""
        network, profile = self.network, self.network.profile
        level = network.first_levels(self.level)
        copies: dict[str, list[str]] = {}
        for name in network.tensors:
            copies[profile.stored_name(name, level)] = [name]
        for name in profile.per_level:
            for t in range(1, level + 1):
                copies.setdefault(variant_name(name, t), []).append(variant_name(name, t))
        group_of = {name: number for number, names in enumerate(groups) for name in names}
        for name in profile.per_level:
            group_of |= {variant_name(name, t): group_of[name] for t in range(1, level + 1)}
        infos: list[list[TensorInfo]] = [[] for _ in groups]
        for stored, info in network.header.tensors.items():
            for name in copies.get(stored, ()):
                infos[group_of[name]].append(replace(info, name=name))
        contents = Contents(
            profile.bits,
            profile.levels[:level],
            frozenset(profile.nested),
            profile.varying,
            network.metadata,
            profile.levels[level - 1].metrics,
            any(entry.digest for entry in profile.levels),
            profile.levels[level - 1].errors,
            profile.metrics,
            extra_metadata=network.extra_metadata,
        )
        with open_writer(target, infos, contents, force=force) as writer:

            def copy(file: Network) -> None:
                with self._reader(file) as reader:
                    for planned in reader.tensors():
                        for block in reader.blocks(planned.info):
                            if planned.mask is not None:
                                words = block.view(planned.info.dtype.words)
                                mask(words, words, profile.bits, level)
                            for name in copies.get(planned.info.name, ()):
                                writer.append(name, block)

            yield copy
            writer.finish(self.meter.progress)
