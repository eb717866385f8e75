"""Write one network from several processes: each its own shards, the first of them the index.

How processes talk is theirs to say. Each step ends with an exchange, in which all tell how theirs
went: where one fails, all do, and none waits for it.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from elsa_format._container import RESERVED, TensorInfo
from elsa_format._container.index import index_bytes, is_index, is_url, shard_names
from elsa_format._counters import check_bits, refuse_unpackable
from elsa_format._destination import sibling
from elsa_format._errors import ElsaError, TensorMismatch
from elsa_format._output import Transaction
from elsa_format._writer import Contents, ShardWriter, Totals, refuse_same_names

Exchange = Callable[[bytes], Sequence[bytes]]
"""Tells all processes what each says, in the order of their numbers; all call it, equally often."""


def alone(message: bytes) -> Sequence[bytes]:
    """The exchange of a process that writes alone."""
    return [message]


class Together:
    """What several processes do in step; this one has a number among them."""

    def __init__(self, target: str, process: int = 0, exchange: Exchange = alone) -> None:
        self.target, self.process, self._exchange = target, process, exchange

    def agree(self, action: Callable[[], bytes | None]) -> list[bytes]:
        """Do something, and give what all say of it; raise everywhere if it failed anywhere."""
        problem = None
        try:
            said = b"+" + (action() or b"")
        except Exception as error:
            problem, said = error, b"-" + str(error).encode("utf-8", "replace")
        answers = self._exchange(said)
        if problem is not None:
            raise problem
        for process, answer in enumerate(answers):
            if not answer.startswith(b"+"):
                text = answer[1:].decode("utf-8", "replace")
                raise ElsaError(f"{self.target}: process {process} failed: {text}")
        return [answer[1:] for answer in answers]

    def check_folder(self) -> None:
        """Refuse a folder that not all processes can write to and see one another's files in."""
        if is_url(self.target):
            return
        folder = Path(os.path.realpath(self.target)).parent
        probe = folder / f".elsa-{os.urandom(8).hex()}.tmp"

        def make() -> bytes:
            probe.touch(exist_ok=False)
            return probe.name.encode()

        def look() -> None:
            for process, name in enumerate(names):
                if not (folder / name.decode()).exists():
                    raise ElsaError(
                        f"{self.target}: process {self.process} does not see what process "
                        f"{process} writes to {folder}; give a folder that all hosts share"
                    )

        try:
            names = self.agree(make)
            self.agree(look)
        finally:
            probe.unlink(missing_ok=True)


class SharedWriter:
    """Takes the tensors of this process's shards; see `open_shared_writer`."""

    def __init__(
        self,
        together: Together,
        groups: Sequence[Sequence[TensorInfo]],
        owners: Sequence[int],
        contents: Contents,
        *,
        force: bool,
    ) -> None:
        self._together, self._groups, self._contents = together, groups, contents
        self._own = [n for n, owner in enumerate(owners) if owner == together.process]
        self._first, self._transaction = together.process == 0, Transaction(force=force)
        self._index = together.target if is_index(together.target) else None
        self._names = shard_names(self._index, len(groups)) if self._index else []
        self._shard_of: dict[str, ShardWriter] = {}
        self._problem: Exception | None = None

    @property
    def files(self) -> list[str]:
        """The paths or URLs of the files that this process writes weights to."""
        target = self._together.target
        names = (self._names[n] if self._index else None for n in self._own)
        return [target if name is None else os.fspath(sibling(target, name)) for name in names]

    def open(self) -> None:
        """Take what is written to, or refuse: nothing is there yet."""
        for n, path in zip(self._own, self.files, strict=True):
            output = self._transaction.open(path)
            place = (n + 1, len(self._groups)) if self._index else None
            writer = ShardWriter(output, self._groups[n], self._contents, place)
            self._shard_of |= dict.fromkeys(writer.tensors, writer)
        if self._index and self._first:
            self._transaction.open_index(self._index)

    def append(self, name: str, data: NDArray[Any]) -> None:
        """Store the next bytes of a tensor of this process; see `ShardWriter.append`.

        What goes wrong is said by `finish`, when all processes listen.
        """
        if self._problem is not None:
            return
        try:
            shard = self._shard_of[name]
            if name in shard.counts:
                info = shard.tensors[name]
                words = data.reshape(-1).view(info.dtype.words)
                where, levels = f"tensor {name!r}", len(self._contents.levels)
                refuse_unpackable(words, None, info.dtype, levels, where, first=shard.taken(name))
            shard.append(name, data)
        except Exception as error:
            self._problem = error

    def finish(self) -> None:
        """Write the headers, and let the files appear: the index last, after all others."""
        shards = list(dict.fromkeys(self._shard_of.values()))
        nothing = Totals((0,) * len(self._contents.levels), self._no_lines())

        def close_data() -> bytes:
            if self._problem is not None:
                raise self._problem
            return _dump(sum((shard.close_data() for shard in shards), nothing))

        network = sum(map(_load, self._together.agree(close_data)), nothing)

        def write_headers() -> None:
            for shard in shards:
                shard.write_header(network)
            if (index := self._transaction.index) is not None:
                about = self._contents.extra_metadata
                index.write_at(0, index_bytes(self._names, self._groups, about))
            self._transaction.sync()

        self._together.agree(write_headers)
        if self._index is None:
            self._together.agree(self._transaction.commit)
        else:
            self._let_appear()

    def _no_lines(self) -> tuple[dict[str, str], ...] | None:
        return tuple({} for _ in self._contents.levels) if self._contents.digests else None

    def close(self) -> None:
        """Leave nothing that did not appear."""
        self._transaction.close()

    def _let_appear(self) -> None:
        """What `Transaction.commit` does, each step by all processes before the next."""
        transaction = self._transaction
        self._together.agree(transaction.retire_index)
        try:
            self._together.agree(lambda: transaction.publish(transaction.outputs))
        except BaseException:
            transaction.unpublish()
            raise
        try:
            self._together.agree(self._publish_index)
        except ElsaError:
            transaction.unpublish()
            raise
        except BaseException:
            # Others may be gone, or the index may be there: only who wrote it takes it away.
            if self._first:
                transaction.unpublish()
            raise
        self.close()

    def _publish_index(self) -> None:
        if (index := self._transaction.index) is not None:
            self._transaction.publish([index])


@contextlib.contextmanager
def open_shared_writer(
    together: Together,
    groups: Sequence[Sequence[TensorInfo]],
    owners: Sequence[int],
    contents: Contents,
    *,
    force: bool = False,
) -> Iterator[SharedWriter]:
    """A writer for groups of tensors, each a shard of the process that owns it.

    All processes give the same groups. Without an index there is one group, of process 0. What was
    not finished leaves nothing behind.
    """

    def prepare() -> None:
        refuse_same_names([level.name for level in contents.levels])
        for info in (info for group in groups for info in group):
            name = info.name
            if name == "__metadata__" or (name.startswith(RESERVED) and name not in variants):
                raise TensorMismatch(f"tensor {name!r}: the name is reserved")
            if name in contents.nested:
                check_bits(info.dtype, contents.bits, f"tensor {name!r}")
        writer.open()

    contents = contents.checked()
    variants = contents.variants()
    writer = SharedWriter(together, groups, owners, contents, force=force)
    with contextlib.closing(writer):
        together.agree(prepare)
        yield writer


def _dump(totals: Totals) -> bytes:
    return json.dumps([totals.nonzero, totals.lines]).encode()


def _load(message: bytes) -> Totals:
    nonzero, lines = json.loads(message)
    return Totals(tuple(nonzero), None if lines is None else tuple(lines))
