"""A run's folder: its files, and what is read back from them."""

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from elsa_format.plugins import Together
from elsa_train._errors import BadRecipe
from elsa_train._file import check_target
from elsa_train._files import cut, read_json, replacing, write_json
from elsa_train._hosts import everyone, limited
from elsa_train._levels import Level
from elsa_train._loop import Trainer
from elsa_train._multilevel import Network
from elsa_train._recipe import FIELDS
from elsa_train._report import Row
from elsa_train._tree import flatten, unflatten

PyTree = Any
PLACES = ("data_dir", "text")
"""Settings that say where the data is, not what it is."""


@dataclass(frozen=True)
class Output:
    """Where a run's files go, and how often it is saved."""

    folder: Path
    checkpoint_every: int = 500
    beside: tuple[Path, ...] = ()
    """What is to be written when all is trained, too: tables and plots."""
    changed_data: bool = False
    """Whether a run may go on with other data than it began with."""

    @property
    def model(self) -> Path:
        """Return the path of the ELSA file."""
        return self.folder / "model.safetensors"

    @property
    def results(self) -> Path:
        """Return the path of the finished run's numbers."""
        return self.folder / "results.json"

    @property
    def references(self) -> Path:
        """Return the path of the references measured so far."""
        return self.folder / "references.json"

    @property
    def initial(self) -> Path:
        """Return the path of the initial network."""
        return self.folder / "initial.npz"

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the unfinished run's checkpoints."""
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Return the path of the JSON lines."""
        return self.folder / "metrics.jsonl"

    @property
    def files(self) -> tuple[Path, ...]:
        """Return what a run writes, but for its checkpoints."""
        return (self.model, self.results, self.references, self.initial, self.metrics)

    @property
    def together(self) -> Together:
        """Return what lets all processes of a run do something in step."""
        hosts = everyone()

        def exchange(message: bytes) -> list[bytes]:
            with limited(self.folder):
                return hosts.exchange(message)

        return Together(str(self.model), hosts.number, exchange)

    def prepare(self) -> None:
        """Make the folder, and refuse one that is not the same on all hosts."""
        together = self.together
        together.agree(lambda: self.folder.mkdir(parents=True, exist_ok=True))
        if jax.process_count() > 1:
            together.check_folder()

    def check(self, network: Network) -> None:
        """Refuse, before training, what could not be written afterwards; all processes call it."""
        for path in (*self.files, *self.beside):
            check_target(path, network, force=True)

    def forget(self) -> None:
        """Remove what a run has left, and nothing else."""
        for path in self.files:
            path.unlink(missing_ok=True)
        if self.checkpoints.is_dir():
            shutil.rmtree(self.checkpoints)

    def write_results(self, settings: dict[str, Any], rows: Sequence[Row], seconds: float) -> None:
        """Write a finished run's numbers."""
        if jax.process_index() == 0:
            found = [dataclasses.asdict(row) for row in rows]
            write_json(
                self.results, {"settings": settings, "seconds": round(seconds, 1), "rows": found}
            )

    def read_results(
        self, settings: dict[str, Any], levels: Sequence[Level]
    ) -> tuple[list[Row], float] | None:
        """Read a finished run's numbers, if they are there and of these settings."""
        found = read_json(self.results)
        if found is None:
            return None
        try:
            check_settings(self, found["settings"], settings)
            rows = [Row(**row) for row in found["rows"]]
            if [row.level for row in rows] != [*(level.name for level in levels), "dense"]:
                raise ValueError("its rows are not the levels")
            return rows, float(found["seconds"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise cut(self.results, error) from None


def check_settings(output: Output, found: Any, settings: dict[str, Any]) -> None:
    """Refuse to go on with a run of other settings or data; where the data is does not matter."""
    found = found if isinstance(found, dict) else {}
    of_data = settings.keys() - FIELDS.keys() - {"seed"}
    decisive = (found.keys() | settings.keys()) - of_data - {*PLACES}
    if any(found.get(key) != settings.get(key) for key in decisive):
        raise BadRecipe(
            f"{output.folder} holds a run with other settings: give another --output, or --force"
        )
    # Runs of earlier versions don't say what their data was.
    changed = sorted(key for key in of_data & found.keys() if found[key] != settings[key])
    if changed and not output.changed_data:
        key = changed[0]
        raise BadRecipe(
            f"{output.folder} holds a run on other data ({key} was {found[key]!r}, is "
            f"{settings[key]!r}): give the data it began with, or --changed-data to resume, or "
            "--force to start over"
        )


def load_network(path: Path, level: int | Literal["dense"], trainer: Trainer) -> Network:
    """Read a level of an ELSA file into the trainer's types."""
    import elsa_format

    with elsa_format.open(path) as file:
        tensors = file.load(level)
    like = trainer.like

    def place(tree: PyTree) -> PyTree:
        found = unflatten(tree, tensors)
        return trainer.replicate(jax.tree.map(lambda x, t: np.asarray(x, t.dtype), found, tree))

    return Network(place(like.params), place(like.state))


def wait(what: str) -> None:
    """Wait for the other processes."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        with limited(what):
            multihost_utils.sync_global_devices(what)


def save_initial(path: Path, network: Network) -> None:
    """Keep the initial network, which references start from."""
    if jax.process_index() == 0:
        arrays = {f"params/{k}": np.asarray(v) for k, v in flatten(network.params).items()}
        arrays |= {f"state/{k}": np.asarray(v) for k, v in flatten(network.state).items()}
        with replacing(path) as temporary:
            np.savez(temporary, **arrays)  # type: ignore[arg-type]


def load_initial(path: Path, trainer: Trainer) -> Network:
    """Read the initial network."""
    like = trainer.like
    wait("initial network")
    try:
        with np.load(path) as file:
            params = {k.removeprefix("params/"): file[k] for k in file if k.startswith("params/")}
            state = {k.removeprefix("state/"): file[k] for k in file if k.startswith("state/")}
        found = Network(unflatten(like.params, params), unflatten(like.state, state))
        for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
            if leaf.dtype != wanted.dtype or not np.isfinite(leaf).all():
                raise ValueError(f"found {leaf.dtype}, expected finite {wanted.dtype}")
    except OSError:
        raise
    except Exception as error:  # zip files and arrays can be wrong in too many ways to list
        raise cut(path, error) from None
    return Network(trainer.replicate(found.params), trainer.replicate(found.state))
