"""Record what levels are worth: the header is written anew, the weights stay (spec §5.4)."""

import contextlib
import dataclasses
import math
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import xxhash

from elsa_format import _container as container
from elsa_format import _profile
from elsa_format._container import LENGTH_BYTES, Header, TensorInfo, serialize
from elsa_format._container.index import index_bytes, is_index, is_url, shard_names
from elsa_format._container.json import MAX_SAFE_INTEGER, dump, parse_document
from elsa_format._destination import Destination, in_directory, open_destination, sibling
from elsa_format._directory import weights_file
from elsa_format._errors import FormatError, InputChanged, InvalidOption
from elsa_format._level_reader import copy_data
from elsa_format._metrics import BETTER, Metric
from elsa_format._network import Network, open_network
from elsa_format._options import check_int, one_of
from elsa_format._output import AtomicFile, Output, Place, Target, localized
from elsa_format._profile import BETTER as BOTH
from elsa_format._profile import KEY, ZEROS, LevelLike, MetricInfo, plain_number, signed
from elsa_format._storage import Source
from elsa_format._storage.shards import read_index
from elsa_format._threads import Meter, Progress, no_progress

Recorded = Mapping[LevelLike, Mapping[str, "float | Metric"]]
"""Metrics by their names, of levels by their numbers or names, or of "dense"."""


def record(
    source: Source,
    out: Target | None,
    metrics: Recorded,
    *,
    recorded: str | None = None,
    max_bytes: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> bool:
    """Record metrics of levels in an ELSA file, whose weights stay as they are.

    A new file is written, with constant memory, and takes its name when it is complete. Checksums
    and digests stay; other metrics do, too. The weights begin elsewhere in the new file, so write
    ONNX models that point into the old one again.

    Args:
        source: The ELSA file, the index of one in shards, or a model directory: a path or URL. With
            an `out`, a stream as well.
        out: Where the file goes; None replaces the source. Shards are replaced by new ones under
            new names; then the index is, and the old ones are removed.
        metrics: For each level, or "dense", its metrics: numbers, or `Metric` with direction,
            samples and standard error.
        recorded: The program that measured them, such as "elsa-format 0.3.0"; kept where it is
            known which values are better.
        max_bytes: Refuse a larger network.
        force: Replace an `out` that exists.
        progress: Called with bytes that are written, and bytes in all.

    Returns:
        Whether the weights begin elsewhere than before, so that such models are outdated.

    Raises:
        InputChanged: The source is no longer what it was when it was opened.
        InvalidOption: It is no ELSA file, or has no such level, or this is no metric.

    >>> from elsa_format import open
    >>> moved = record("net.safetensors", "known.safetensors", {1: {"accuracy": 0.91}})
    >>> with open("known.safetensors") as file:
    ...     file.choose(min={"accuracy": 0.9})
    1
    """
    if out is None or (force and _is_same(source, out)):
        source, target = weights_file(localized(source)), None
        if not isinstance(source, str | os.PathLike):
            raise InvalidOption("a stream cannot be replaced: name an output")
        if is_index(source) and os.path.islink(source):
            raise InvalidOption(f"{source}: is a link, which cannot be replaced; name an output")
    else:
        target = in_directory(source, out)
        if is_index(weights_file(source)) != is_index(target):
            raise InvalidOption("an index is recorded to an index, and a file to a file")
    with open_network(source, sequential=target is not None, max_bytes=max_bytes) as network:
        _refuse_others(network)
        changes = _Changes(network, metrics, recorded)
        heads = [changes.head(file.header, file.name) for file in network.files]
        old = [(file.name, file.header.raw) for file in network.files]
        moved = [file.header.data_start for file in network.files] != [len(head) for head in heads]
        if target is None and [raw for _, raw in old] == [head[LENGTH_BYTES:] for head in heads]:
            return False
        with (
            _Replacement(source, heads)  # type: ignore[arg-type]
            if target is None
            else open_destination(target, len(heads), force=force, in_order=len(heads) == 1)
        ) as destination:
            meter = Meter(progress, network.header.data_size)
            for file, head, output in zip(network.files, heads, destination.weights, strict=True):
                copy_data(file, head, output, meter.tick, verify=False)
            network.check_unchanged()
            if target is None:
                _refuse_replaced(source, old)
            tensors = [file.header.tensors.values() for file in network.files]
            network.close()  # Windows replaces no open file
            destination.finish(tensors, network.extra_metadata, progress)
    if target is None and is_index(source):
        _remove_shards(source, {os.path.basename(file) for file, _ in old})  # type: ignore[arg-type]
        return True
    return moved


def _is_same(source: Source, out: Target) -> bool:
    """Whether an output is the source itself."""
    with contextlib.suppress(OSError, TypeError):
        return os.path.samefile(weights_file(source), weights_file(out))
    return source == out


def _refuse_others(network: Network) -> None:
    """Refuse what has no metrics of its own."""
    if network.downloads:
        raise InvalidOption(
            f"{network.name}: is a delivery file; record in its ELSA file, then run elsa-ship again"
        )
    if "dense" not in network.levels:
        raise InvalidOption(f"{network.name}: is a level file; record in the ELSA file it is from")
    if network.profile.shard is not None:
        raise InvalidOption(f"{network.name}: is a shard; name the index of all shards")


class _Changes:
    """What is recorded: checked, and put into the profile of each file."""

    def __init__(self, network: Network, metrics: Recorded, recorded: str | None) -> None:
        self.where, self.recorded = network.name, recorded
        self.values: dict[int | str, dict[str, Metric]] = {}
        for level, found in metrics.items():
            number = network.level_number(level)
            mine = self.values.setdefault(number, {})
            mine |= {name: self._metric(name, value) for name, value in found.items()}
        if not any(self.values.values()):
            raise InvalidOption("no metric is given, such as accuracy=0.93")
        self.infos = {
            name: self._info(name, network.profile)
            for name in dict.fromkeys(name for found in self.values.values() for name in found)
        }

    def _metric(self, name: Any, value: Any) -> Metric:
        if not isinstance(name, str):
            raise InvalidOption(f"metric {name!r}: expected its name")
        found = value if isinstance(value, Metric) else Metric(value, "")
        if found.better:
            one_of("better", found.better, BOTH)
        samples, error = found.samples, found.error
        return Metric(
            self._number(f"metric {name!r}", found.value),
            found.better,
            None if samples is None else check_int("samples", samples, 0, MAX_SAFE_INTEGER),
            None if error is None else self._number(f"error of metric {name!r}", error, low=0),
        )

    def _number(self, what: str, value: Any, low: float = -math.inf) -> float:
        number = plain_number(value)
        with contextlib.suppress(OverflowError):  # an integer of 400 digits
            if type(number) in (int, float) and math.isfinite(number) and number >= low:
                return float(number)
        expected = "a finite number" if low else "a finite number from 0"
        shown = repr(number) if isinstance(number, float) else "it"
        raise InvalidOption(f"{what}: {shown} is not {expected}")

    def _info(self, name: str, profile: _profile.Profile) -> MetricInfo | None:
        """How a metric was measured, as far as that is the same for all levels that have it."""
        found = {n: values[name] for n, values in self.values.items() if name in values}
        before = profile.metrics.get(name)
        told = {metric.better for metric in found.values() if metric.better}
        if len(told) > 1:
            raise InvalidOption(f"metric {name!r}: higher and lower cannot both be better")
        better = next(iter(told), before.better if before else BETTER.get(name))
        if better is None:
            return None
        samples = {metric.samples for metric in found.values()}
        others = [level.metrics for level in profile.levels if level.number not in found]
        others += [profile.dense_metrics] if "dense" not in found else []
        if any(name in metrics for metrics in others):
            samples.add(before.samples if before else None)
        only = next(iter(samples)) if len(samples) == 1 else None
        return MetricInfo(better, only, self.recorded)  # type: ignore[arg-type]

    def head(self, header: Header, where: str) -> bytes:
        """The first bytes of a file with the metrics in its header."""
        document = parse_document(header.metadata[KEY], where)
        for number, found in self.values.items():
            entry = (
                document.setdefault("dense", {})
                if number == "dense"
                else document["levels"][int(number) - 1]
            )
            values, errors = entry.setdefault("metrics", {}), entry.setdefault("errors", {})
            for name, metric in found.items():
                values[name] = metric.value
                errors.pop(name, None)
                if metric.error is not None:
                    errors[name] = metric.error
            if not errors:
                del entry["errors"]
        about = document.setdefault("metrics", {})
        for name, info in self.infos.items():
            if info is not None:
                unknown = {k: v for k, v in about.get(name, {}).items() if k not in _INFO}
                about[name] = unknown | info.to_json()
        if not about:
            del document["metrics"]
        raw = _signed(header, document)
        _profile.parse(container.parse(raw[LENGTH_BYTES:], self.where), self.where)
        return raw


_NUMBER = "-00001-of-00001.safetensors"
"""How names of shards end."""
_INFO = {field.name for field in dataclasses.fields(MetricInfo)}


def _signed(header: Header, document: dict[str, Any]) -> bytes:
    """A header with another profile, its checksum, and the room that spec §3.5 asks for."""

    def head(document: dict[str, Any], digits: str, reserve: int = 0) -> bytes:
        text = dump(_sorted(document | {"header": f"xxh3:{digits}"}))
        return serialize(header.tensors, header.metadata | {KEY: text}, reserve=reserve)

    sizes = {name: header.tensors[name].elements for name in document["nested"]}
    most = MAX_SAFE_INTEGER if "shard" in document else sum(sizes.values())
    longest = document | {
        "levels": [level | {"nonzero": most} for level in document["levels"]],
        "nested": {name: [size] * len(document["levels"]) for name, size in sizes.items()},
    }
    reserve = len(head(longest, ZEROS))
    return signed(lambda digits: head(document, digits, reserve))


def _sorted(value: Any) -> Any:
    """A document with sorted keys (spec §3.5)."""
    if isinstance(value, dict):
        return {key: _sorted(item) for key, item in sorted(value.items())}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


class _Replacement(Destination):
    """Outputs in place of a file, or of an index, whose shards get names of their own.

    So the index names at every moment shards that are there and fit it. It is replaced, and never
    gone, as that of a new network is before its shards come.
    """

    def __init__(self, source: Place, heads: Sequence[bytes]) -> None:
        super().__init__(force=True)
        if not is_index(source):
            self.weights = [self.open_file(source)]
        else:
            tag = xxhash.xxh3_64_hexdigest(b"".join(heads))[:8]
            names = []
            for name in shard_names(source, len(heads)):
                names.append(f"{name[: -len(_NUMBER)]}-{tag}{name[-len(_NUMBER) :]}")
            self.names = names
            self.weights = [self.open_file(sibling(source, name)) for name in names]
            self.open_file(source)
        for output in self.outputs:
            _keep_mode(source, output)

    def finish(
        self,
        tensors: Sequence[Iterable[TensorInfo]],
        extra_metadata: Mapping[str, Any],
        progress: Progress = no_progress,
    ) -> None:
        if self.names:
            self.outputs[-1].write_at(0, index_bytes(self.names, tensors, extra_metadata))
        self.commit(progress)


def _keep_mode(source: Place, output: Output) -> None:
    """Let a file have the permissions of the one that it replaces."""
    if isinstance(output, AtomicFile) and hasattr(os, "fchmod"):
        os.fchmod(output.fd, stat.S_IMODE(os.stat(source).st_mode))


def _refuse_replaced(source: Source, old: Sequence[tuple[str, bytes]]) -> None:
    """Compare the files that were read with those that have their names now."""
    with contextlib.suppress(OSError, FormatError), open_network(source) as network:
        if [(file.name, file.header.raw) for file in network.files] == old:
            return
    raise InputChanged(f"{old[0][0]}: was replaced while it was read; run again")


def _remove_shards(index: Place, names: AbstractSet[str]) -> None:
    """Remove the shards that an index no longer names."""
    for name in names - set(read_index(index)[0].files):
        place = sibling(index, name)
        if is_url(place):
            from elsa_format._storage.fsspec import find_store  # only where there are stores

            store, found = find_store(os.fspath(place))
            store.rm_file(found)
        else:
            Path(place).unlink(missing_ok=True)
