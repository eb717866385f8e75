"""Download the first bytes of a delivery file, and later those that follow.

What is kept is at every moment a prefix of the server's file: an interrupted fetch, and an upgrade,
ask for what follows.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from elsa_format._choose import LevelChoice, Metrics, choose_level
from elsa_format._container.index import Index, is_index, is_url, shown
from elsa_format._container.index import parse as parse_index
from elsa_format._delivery.copy import Copy
from elsa_format._destination import names_directory, refuse_others
from elsa_format._directory.manifest import SideFile, find_folder, missing
from elsa_format._errors import InvalidOption, NoSuchLevel
from elsa_format._network import Network, join_shards
from elsa_format._network.stored import StoredNetwork
from elsa_format._options import Limit
from elsa_format._output import Place, is_special, localized, new_folders
from elsa_format._profile import LevelLike, LevelNumber
from elsa_format._storage import Source
from elsa_format._storage.shards import read_index_bytes, shard_path, shard_source
from elsa_format._threads import Meter, Progress, no_progress
from elsa_format.levels import Sparsity


@dataclass(frozen=True)
class FetchReport:
    """What is downloaded now, and what it took.

    >>> fetch("net.ship.safetensors", "device.ship.safetensors", level=1).level
    1
    """

    level: LevelNumber
    """The level that was asked for."""
    size: int
    """Bytes that are kept."""
    fetched: int
    """Bytes that were transferred for it."""
    available: LevelNumber
    """The densest level that is downloaded: the one that was asked for, or a denser one."""


def fetch(
    source: Place,
    out: Place,
    *,
    level: LevelLike | None = None,
    sparsity: Sparsity | None = None,
    max_size: int | None = None,
    min: Metrics | None = None,
    max: Metrics | None = None,
    upgrade: LevelLike | None = None,
    max_bytes: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> FetchReport:
    """Download a level of a delivery file, or upgrade a previous download.

    `out` becomes a prefix of the file; what it has of it already is kept. It is written only when
    nothing can be refused any more, and by one process at a time.

    Args:
        source: A delivery file, or the index (.index.json) of several: a path or URL. Or a model
            directory; at a URL it has the manifest that `ship` writes, `elsa-files.json`.
        out: Where it goes. The files of an index are written beside it; a directory is written
            into a directory, its side files first. It must be on this machine.
        level: The level: its number, its name, or "dense".
        sparsity: The densest level with at least this sparsity.
        max_size: The densest level that takes no more bytes to download.
        min: The sparsest level whose metrics are at least these, such as `{"accuracy": 0.9}`; with
            `max_size`, the best of them that takes no more bytes.
        max: As `min`, of metrics that are at most these.
        upgrade: As `level`, for an `out` that must exist.
        max_bytes: Refuse headers, or tensors as dense arrays, that take more than this.
        force: Replace files that are there and differ; weights of other networks, too.
        progress: Called with bytes that are downloaded, and bytes in all.

    Returns:
        What is downloaded, and how many bytes were transferred for it.

    Raises:
        OutputExists: `out` is no prefix of the source, or another process is fetching it.

    >>> first = fetch("net.ship.safetensors", "phone.ship.safetensors", sparsity=95)
    >>> more = fetch("net.ship.safetensors", "phone.ship.safetensors", upgrade=2)
    >>> first.level, more.level, more.size > first.size
    (1, 2, True)
    """
    limit = Limit(max_bytes)
    choice = LevelChoice(level=level, sparsity=sparsity, max_size=max_size, min=min, max=max)
    if choice.given == (upgrade is not None):
        raise TypeError("give exactly one of level, sparsity, max_size, upgrade")
    source, target = localized(source), localized(os.fspath(out))
    if not is_url(source) and is_special(source):
        raise InvalidOption(f"{os.fspath(source)}: a pipe cannot be resumed")
    if is_url(target):
        raise InvalidOption(
            f"{shown(target)}: a download grows in place; fetch to a local path, "
            "and copy it with the store's own tool, such as aws s3 cp"
        )
    if is_special(target):
        raise InvalidOption(f"{target}: the output grows in place, so it must be a file")
    folder, side = find_folder(source, Limit(max_bytes)), list[SideFile]()
    if folder is not None:
        source = folder.weights
    into = folder is not None and names_directory(target)
    if not into and is_index(source) != is_index(target):
        raise InvalidOption("an index is fetched to an index, and a file to a file")
    with contextlib.ExitStack() as stack:
        path = Path(target)
        transferred = folder.transferred if folder else 0
        sources: list[Place] = folder.places() if folder else [source]
        if folder is not None and into:
            side = folder.side_files(path)
            refuse_others(os.fspath(path), folder.weights_name)
            path = path / folder.weights_name
        places: list[tuple[Place, Path]] = [(source, path)]
        files = [file.path for file in side]
        index, where = None, ""
        if is_index(source):
            raw, where = read_index_bytes(source, limit)
            index = parse_index(raw, where)
            places = [(_shard(source, name), shard_path(path, name)) for name in index.files]
            side.append(SideFile.of(path, raw, where))
            transferred += len(raw)
            files.append(path)
        files += [output for _, output in places]
        _refuse_itself([*sources, *(place for place, _ in places)], files)
        if upgrade is not None and not path.exists():
            raise InvalidOption(
                f"{path}: does not exist", "use {level} for a first download", level=upgrade
            )
        if folder is not None:
            stack.enter_context(new_folders(path.parent))
        copies = [
            stack.enter_context(Copy(place, output, limit, force=force)) for place, output in places
        ]
        network = _compare(source, index, where, copies)
        limit.tensors(network.header.data_size, network.name)
        # What is there is looked at from here on: the weights, and with them all, are locked.
        wanted = missing(side, (output for _, output in places), force=force)
        extra = sum(file.entry.size for file in wanted)
        choice = choice if upgrade is None else LevelChoice(level=upgrade)
        part = _choose(network, copies, extra, choice)
        for copy in copies:
            copy.check(part)
        meter = Meter(progress, extra + sum(copy.missing(part) for copy in copies))
        for copy in copies:  # or another fetch into this directory would replace side files
            copy.claim()
        for file in wanted:  # first: where a level is, all that goes with it is, too
            transferred += file.bring(meter, force=force)
        for copy in copies:
            copy.complete(part, meter)
        return FetchReport(
            _number(network, part),
            sum(file.entry.size for file in side) + sum(copy.have for copy in copies),
            transferred + sum(copy.transferred for copy in copies),
            _number(network, sorted(copy.parts for copy in copies)[0]),
        )


def _number(network: Network, part: int) -> LevelNumber:
    return part if part <= len(network.profile.levels) else "dense"


def _shard(index: Place, name: str) -> Place:
    """A file beside an index, which must not lead elsewhere."""
    found = shard_source(index, name)
    assert isinstance(found, str | os.PathLike)
    return found


def _refuse_itself(sources: Iterable[Place], outputs: Iterable[Path]) -> None:
    """Refuse outputs that are files of the source, by whatever names or links."""
    own = {_identity(os.fspath(place)) for place in sources if not is_url(place)}
    for path in outputs:
        if (found := _identity(path)) is not None and found in own:
            raise InvalidOption(f"{path}: is a file of the source; write to another place")


def _identity(path: str | Path) -> tuple[int, int] | None:
    """Which file it is on this machine, if it exists."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_dev, found.st_ino
    return None


def _compare(source: Place, index: Index | None, where: str, copies: list[Copy]) -> Network:
    """The network of the source; outputs, and shards among each other, must fit (ELSA-D-042)."""
    if index is None:
        copies[0].begin()
        return _network(copies[0])
    by_place = {os.fspath(copy.source): copy for copy in copies}

    def open_shard(place: Source) -> Network:
        assert isinstance(place, str | os.PathLike)
        copy = by_place[os.fspath(place)]
        copy.begin(shard=True)
        return _network(copy)

    return join_shards(source, index, where, open_shard)


def _network(copy: Copy) -> Network:
    return StoredNetwork(copy.name, copy.prefix.header, copy.prefix.profile, storage=copy)


def _choose(
    network: Network,
    copies: list[Copy],
    extra: int,
    choice: LevelChoice,
) -> int:
    """The last part to download; `extra` bytes come with it."""
    dense = len(network.profile.levels) + 1
    read, max_size = sum(copy.read for copy in copies), choice.max_size

    def takes(part: int) -> int:
        """Bytes that are downloaded for a part, with those that have been: headers and heads."""
        lacking = extra + sum(copy.takes(part) for copy in copies)
        return read + lacking if lacking else 0

    def part_of(number: LevelNumber) -> int:
        return dense if number == "dense" else number

    if max_size is None:
        return part_of(choose_level(network, choice))
    if choice.measured:
        found = choice.within(network, lambda n: takes(part_of(n)), max_size, "bytes")
        return part_of(found)
    for part in range(dense, 0, -1):
        if takes(part) <= max_size:
            return part
    raise NoSuchLevel(
        f"{network.name}: no level takes {max_size} bytes or less; level 1 takes {takes(1)}"
    )
