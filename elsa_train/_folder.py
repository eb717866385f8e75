"""A run's folder: its files, written whole or not at all and doubted when read, and checkpoints."""

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

import elsa_format
from elsa_format.levels import Pattern
from elsa_format.plugins import Together
from elsa_train import _method
from elsa_train._errors import BadRecipe, InvalidRun, NonFiniteLoss, TrainError
from elsa_train._file import check_target
from elsa_train._levels import Level
from elsa_train._loop import Carry, Phase, Trainer
from elsa_train._multilevel import FrozenLevel, Network, Progress, without_state
from elsa_train._recipe import FIELDS
from elsa_train._sharded.hosts import everyone, limited
from elsa_train._tree import flatten, unflatten

PyTree = Any
PLACES = ("data_dir", "text", "start")
"""Settings that say where the data or the first network is, not what it is."""


@dataclass(frozen=True)
class Row:
    """One line of the result table: accuracies from 0 to 1, or losses; None where not measured."""

    level: str
    sparsity: float
    nonzero: int
    elsa: float
    reference: float | None = None
    equal_epochs: float | None = None
    alone: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no run has measured: rows are read back from a run's folder."""
        measured = [x for x in (self.reference, self.equal_epochs, self.alone) if x is not None]
        for number in (self.sparsity, self.nonzero, self.elsa, *measured):
            if type(number) not in (int, float) or not math.isfinite(number):
                raise ValueError(f"found {number!r} among the measures of level {self.level}")


@dataclass(frozen=True)
class Output:
    """Where a run's files go, and how often it is saved."""

    folder: Path
    checkpoint_every: int = 500
    beside: tuple[Path, ...] = ()
    """What is to be written when all is trained, too: tables and plots."""
    changed_data: bool = False
    """Whether a run may go on with other data than it began with."""
    checkpoint_minutes: float = math.inf
    """Minutes after which a run is saved, too, however few its steps."""

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


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary name, and the file written under it its own at the end.

    >>> with replacing(Path("table.md")) as temporary:
    ...     _ = temporary.write_text("| level |")
    >>> temporary.exists(), Path("table.md").read_text()
    (False, '| level |')
    """
    temporary = path.with_name(f".new-{path.name}")  # the suffix may choose the format
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n", "utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON document, None if there is none."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise cut(path, error) from None


def cut(path: Path, problem: object) -> InvalidRun:
    """Say that a file is not what a run has written."""
    return InvalidRun(f"{path}: cut, or not of a run ({problem}); --force starts over")


def drop_cut_line(path: Path) -> None:
    """Cut off what a killed run has left of its last line."""
    if path.exists():
        whole = path.read_bytes().rfind(b"\n") + 1
        if whole < path.stat().st_size:
            os.truncate(path, whole)


class Saved(NamedTuple):
    """A run in progress; phase is None between routines."""

    progress: Progress
    phase: Phase | None


class Checkpoints:
    """The last checkpoints of a run, written by orbax while the run goes on."""

    def __init__(self, output: Output, settings: dict[str, Any]) -> None:
        """Open the folder; settings must be those of the checkpoints in it."""
        self._output, self._folder, self._settings = output, output.checkpoints, settings
        self._saved = time.monotonic()
        with _saying(f"{self._folder}: can't be used", TrainError), limited(self._folder):
            self._manager = ocp.CheckpointManager(
                self._folder.absolute(),
                options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True),
            )

    def save(self, progress: Progress, phase: Phase | None = None) -> None:
        """Save, unless something is not finite: then the last good checkpoint stays the last."""
        if phase is not None and not _method.all_finite(phase.carry):
            raise NonFiniteLoss("weights or optimizer state are not finite; nothing was saved")
        step = 0 if phase is None else phase.step
        # Counted, not made of phase and step: orbax's numbers must fit 32 bits.
        number = (self._manager.latest_step() or 0) + 1
        meta = {
            "settings": self._settings,
            "done": progress.done,
            "step": step if phase is not None else None,
            "frozen": [asdict(without_state(frozen)) for frozen in progress.frozen],
        }
        arrays = _arrays(progress, phase)
        problem = f"{self._folder}: checkpoint {number} can't be written"
        with _saying(problem, TrainError), limited(self._folder):
            self._manager.save(
                number,
                args=ocp.args.Composite(
                    arrays=ocp.args.StandardSave(arrays),
                    meta=ocp.args.JsonSave(meta),
                ),
            )

        self._saved = time.monotonic()

    def due(self) -> bool:
        """Tell whether it is time to save, by this process's clock."""
        return time.monotonic() - self._saved >= 60 * self._output.checkpoint_minutes

    def restore(self, start: Progress, phase: Phase) -> Saved | None:
        """Read the last checkpoint, into trees like these."""
        number = self._manager.latest_step()
        if number is None:
            return None
        problem = (
            f"{self._folder}: checkpoint {number} is cut, or not of a run; --force starts over"
        )
        with _saying(problem, InvalidRun):
            return self._restore(number, start, phase)

    def _restore(self, number: int, start: Progress, phase: Phase) -> Saved:
        meta = self._manager.restore(number, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))[
            "meta"
        ]
        check_settings(self._output, meta["settings"], self._settings)
        done, step = meta["done"], meta["step"]
        if type(done) is not int or not (step is None or (type(step) is int and step >= 0)):
            raise ValueError(f"done {done!r}, step {step!r}")
        if len(meta["frozen"]) != (max(done, 0) + 1) // 2:
            raise ValueError(f"{len(meta['frozen'])} frozen levels after {done} routines")
        frozen = tuple(_record(entry, start.network.state) for entry in meta["frozen"])
        within = meta["step"] is not None
        like = _arrays(start._replace(frozen=frozen), phase if within else None)
        arrays = self._manager.restore(
            number,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
            ),
        )["arrays"]
        states = [jax.tree.map(np.asarray, state) for state in arrays["frozen"]]
        progress = Progress(
            meta["done"],
            Network(arrays["params"], arrays["state"]),
            arrays["counters"],
            tuple(
                _record(entry, state) for entry, state in zip(meta["frozen"], states, strict=True)
            ),
        )
        if not within:
            return Saved(progress, None)
        carry = Carry(*(arrays["phase"][name] for name in Carry._fields))
        return Saved(progress, Phase(meta["step"], carry, arrays["phase"]["kept"]))

    def close(self) -> None:
        """Wait until what was saved is on disk."""
        problem = f"{self._folder}: a checkpoint can't be written"
        with _saying(problem, TrainError), limited(self._folder):
            self._manager.wait_until_finished()
            self._manager.close()


@contextmanager
def _saying(problem: str, kind: type[TrainError], advice: str = "") -> Iterator[None]:
    """Say in one line what orbax and tensorstore say in many, with errors of every class."""
    try:
        yield
    except (TrainError, OSError):
        raise
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        raise kind(f"{problem} ({type(error).__name__}: {first}){advice}") from None


def _arrays(progress: Progress, phase: Phase | None) -> PyTree:
    tree = {
        "params": progress.network.params,
        "state": progress.network.state,
        "counters": progress.counters,
        "frozen": [frozen.state for frozen in progress.frozen],
    }
    if phase is not None:
        tree["phase"] = {**phase.carry._asdict(), "kept": phase.kept}
    return tree


def _record(entry: dict[str, Any], state: PyTree) -> FrozenLevel:
    pattern = entry["level"]["pattern"]
    level = Level(**{**entry["level"], "pattern": Pattern(**pattern) if pattern else None})
    return FrozenLevel(**{**entry, "level": level, "state": jax.tree.map(np.asarray, state)})
