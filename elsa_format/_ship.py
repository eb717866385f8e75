"""Make delivery files of ELSA files: read once, checked and coded at the same time."""

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from elsa_format._container.index import Index, is_index
from elsa_format._container.json import dump
from elsa_format._delivery import BLOCK, BLOCKS, SUFFIX, header_bytes
from elsa_format._delivery.encoder import DeliveryEncoder
from elsa_format._destination import in_directory, open_destination, sibling
from elsa_format._directory import SHIP, weights_file
from elsa_format._errors import InvalidOption
from elsa_format._network import Network, open_network
from elsa_format._options import check_int
from elsa_format._output import Output, Place, Target, names_file
from elsa_format._profile import LevelNumber
from elsa_format._storage import Source
from elsa_format._storage.shards import read_index
from elsa_format._threads import Meter, Progress, no_progress
from elsa_format._verify import NetworkCheck


@dataclass(frozen=True)
class ShipReport:
    """What was written.

    >>> ship("net.safetensors", "again.ship.safetensors").sizes["dense"] < 42000
    True
    """

    sizes: dict[LevelNumber, int]
    """How many of the first bytes each level needs; of all shards together."""
    source: int
    """Bytes of the ELSA file, or of all shards."""
    files: tuple[str, ...]
    """What was written, the index last; empty for a stream."""


def ship(
    source: Source,
    target: Target,
    *,
    block: int = BLOCK,
    split: bool = False,
    jobs: int = 1,
    side_files: Mapping[str, bytes] | None = None,
    max_bytes: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> ShipReport:
    """Make a delivery file of an ELSA file, which is read once, and verified on the way.

    A source that is an index needs a target that is one: each shard becomes a delivery file. A
    model directory gives a directory, with `model.ship.safetensors`, its side files, and a list
    of them, `elsa-files.json`, which `fetch` goes by where directories cannot be listed.
    `split` writes the header with the head, and each part, as files of their own, for hosts
    without range requests: `cat target.part-*` is the delivery file. `block` is log₂ of the words
    in a block. `side_files` are written into the directory that `target` is, too, by their names
    with slashes. A network of more than `max_bytes` is refused from the header alone.

    >>> report = ship("net.safetensors", "new.ship.safetensors")
    >>> list(report.sizes), report.sizes[1] < report.source / 10
    ([1, 2, 3, 'dense'], True)
    """
    if check_int("block", block, low=0) not in BLOCKS:
        raise InvalidOption(f"block is {block}, expected {BLOCKS.start}..{BLOCKS.stop - 1}")
    jobs = check_int("jobs", jobs, low=1)
    target = in_directory(source, target, variant=SHIP, made=side_files)
    source = weights_file(source)
    if is_index(source) != is_index(target):
        raise InvalidOption("an index is shipped to an index, and a file to a file")
    if split and not names_file(target):
        raise InvalidOption("the parts of a stream cannot be files of their own")
    with open_network(source, sequential=True, max_bytes=max_bytes) as network:
        network.need_levels()
        index = read_index(source)[0] if is_index(source) else None
        files = _files(target, network, index, split=split)
        with open_destination(target, files=files, force=force, in_order=True) as destination:
            meter, check = Meter(progress, network.header.data_size), NetworkCheck(network)
            made, each = [], len(destination.weights) // len(network.files)
            for number, file in enumerate(network.files):
                outputs = destination.weights[number * each : (number + 1) * each]
                with DeliveryEncoder(file.header, file.profile, block, jobs) as encoder:
                    check.file(file, meter.tick, encoder.take)
                    encoder.finish()
                    made.append(_write(encoder, block, outputs))
            check.finish()
            if index is not None:
                assert destination.index is not None
                destination.index.write_at(0, _index_bytes(index))
            destination.commit(progress)
            written = [*destination.weights, *filter(None, [destination.index])]
    sizes = {level: sum(one[level] for one in made) for level in made[0]}
    names = [output.name for output in written] if names_file(target) else []
    return ShipReport(sizes, network.file_size, tuple(names))


def _files(target: Target, network: Network, index: Index | None, *, split: bool) -> list[Place]:
    """Where delivery files go that have not the target's name."""
    files: list[Place] = []
    if not isinstance(target, str | os.PathLike):
        return files
    if index is not None:
        shards = (index.weight_map[next(iter(file.header.tensors))] for file in network.files)
        files = [sibling(target, delivery_name(shard)) for shard in shards]
    if split:
        levels = len(network.profile.levels)
        files = [part for file in files or [target] for part in part_names(file, levels)]
    return files


def _index_bytes(index: Index) -> bytes:
    """The index of the delivery files of shards."""
    weight_map = {name: delivery_name(file) for name, file in index.weight_map.items()}
    parts = {"metadata": index.metadata, "weight_map": weight_map}
    return dump({key: dict(sorted(value.items())) for key, value in parts.items()}).encode()


def _write(
    encoder: DeliveryEncoder, block: int, outputs: Sequence[Output]
) -> dict[LevelNumber, int]:
    """Write a delivery file, or each part to a file of its own; what each level needs of it."""
    head, levels = zlib.compress(encoder.head, 9), encoder.levels
    sizes = [len(head), *(encoder.size(part) for part in range(1, levels + 2))]
    checksum = f"xxh3:{xxhash.xxh3_64_hexdigest(head)}"
    start = header_bytes(block, sizes, len(encoder.head), checksum)
    for part in range(levels + 2):
        if part < len(outputs):
            output, position = outputs[part], 0
        for piece in encoder.read(part) if part else (start, head):
            output.write_at(position, piece)
            position += memoryview(piece).nbytes
    ends = np.cumsum([len(start), *sizes])[2:].tolist()
    numbers: list[LevelNumber] = [*range(1, levels + 1), "dense"]
    return dict(zip(numbers, ends, strict=True))


def delivery_name(shard: str) -> str:
    """The delivery file of a shard (ELSA-D-042).

    >>> delivery_name("model-00001-of-00002.safetensors")
    'model-00001-of-00002.ship.safetensors'
    """
    return shard.removesuffix(".safetensors") + SUFFIX


def part_names(target: str | os.PathLike[str], levels: int) -> list[str]:
    """The files that a delivery file is split into: in the order of their names.

    >>> part_names("net.ship.safetensors", 1)[-1]
    'net.ship.safetensors.part-002'
    """
    return [f"{os.fspath(target)}.part-{number:03}" for number in range(levels + 2)]
