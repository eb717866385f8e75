"""Names of earlier releases, kept for one more."""

from collections.abc import Mapping, Sequence

from elsa_format._errors import NotElsa
from elsa_format._extract import restore_files
from elsa_format._file import File
from elsa_format._options import renamed
from elsa_format._output import Output, Target, Transaction
from elsa_format._profile import LevelNumber
from elsa_format._storage import Source
from elsa_format._threads import Progress, no_progress


class Delivery(File):
    """A delivery file, as `open_delivery` gives it: a `File` with the names of earlier releases.

    >>> with open_delivery("net.ship.safetensors") as net:
    ...     sorted(net.load("90%"))
    ['bias', 'layer']
    """

    @property
    def there(self) -> LevelNumber | None:
        """The densest level that is available."""
        renamed("Delivery.there", "File.available")
        return self.available[-1] if self.available else None

    @property
    def sizes(self) -> Mapping[LevelNumber, int]:
        """How many of the first bytes of the file each level needs."""
        renamed("Delivery.sizes", "File.downloads")
        return self.downloads

    def whole(
        self, target: Target, *, force: bool = False, progress: Progress = no_progress
    ) -> None:
        """Write the ELSA file that the delivery file was made of, byte for byte."""
        renamed("Delivery.whole", "extract(…, restore=True)")
        restore_files(self.network, target, force=force, progress=progress)


def open_delivery(source: Source, *, max_bytes: int | None = None) -> Delivery:
    """Open a delivery file, as `open` does; anything else is refused.

    >>> with open_delivery("net.ship.safetensors") as net:
    ...     net.available
    (1, 2, 3, 'dense')
    """
    file = Delivery(source, max_bytes=max_bytes)
    if not file.downloads:
        file.close()
        raise NotElsa(f"{file.path}: is not a delivery file")
    return file


def commit_outputs(outputs: Sequence[Output]) -> None:
    """Let outputs appear that belong together."""
    renamed("commit_outputs", "Transaction.commit")
    transaction = Transaction()
    transaction.outputs.extend(outputs)
    transaction.commit()
