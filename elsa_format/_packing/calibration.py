"""Levels by calibration: what is asked, and a network whose library has the layers solved.

A kind of network that can be run registers a function as an entry point of the group
`elsa.calibrations`, under the suffix of its files, or `directory` for model directories. It is
called with the source, the samples and `CalibrationOptions`, and returns a `Calibration`.
"""

import os
from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from numpy.typing import NDArray

from elsa_format._container import TensorInfo
from elsa_format._container.dtypes import of_array
from elsa_format._container.index import is_url
from elsa_format._counters import Words, refuse_unpackable, words_of
from elsa_format._directory import is_directory
from elsa_format._errors import InvalidOption, TensorMismatch
from elsa_format._memory import BLOCK
from elsa_format._options import check_int, one_of
from elsa_format._packing import Checkpoint, array_blocks, plugged_in, same_tensor
from elsa_format._packing.assignment import Append, Assignment, Counters, specs_of
from elsa_format._packing.layers import unpruned
from elsa_format._profile import MetricInfo, variant_name
from elsa_format._threads import Progress, tell
from elsa_format.levels import Pattern, zeros_of

GROUP, DIRECTORY = "elsa.calibrations", "directory"
BEARABLE = Fraction(3, 10)
"""The sparsity up to which pretrained networks usually do without calibration."""
KeepDense = Literal["bounded", "exact"]
KEEP_DENSE: tuple[KeepDense, ...] = get_args(KeepDense)
Favour = Literal["sparse", "dense"]
FAVOURS: tuple[Favour, ...] = get_args(Favour)


@dataclass(frozen=True, kw_only=True)
class CalibrationOptions:
    """What `PackOptions` asks of a calibration.

    Args:
        levels: Sparsest first.
        scope: How weights are shared among the layers: by their measured errors, alike, or by
            magnitude. None: whatever is best on the samples that are held back.
        samples: Use at most so many.
        length: Tokens of each sample of text.
        keep_dense: Bound what the dense network loses, or keep it but for the counters.
        favour: Whom a trade between sparse levels and the dense network serves.
        all_classes: Weigh all classes alike, however often the samples show them.
        max_memory: Bytes of activations that stay in memory; the rest goes to temporary files.
        threads: Default: as many as there are cores. They do not change the result.
        include: Shell patterns of tensor names; only these are nested.
        exclude: Shell patterns of tensor names that are not nested.
        nest_all: Nest embeddings, positions, norms, routers and output heads, too, if they can be.
    """

    levels: Sequence[Fraction | Pattern]
    scope: Literal["auto", "uniform", "global"] | None = None
    samples: int | None = None
    length: int | None = None
    keep_dense: KeepDense = "bounded"
    favour: Favour | None = None
    all_classes: bool = False
    max_memory: int | None = None
    threads: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    nest_all: bool = False

    def __post_init__(self) -> None:
        for name in ("samples", "length", "max_memory", "threads"):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_int(name, value, low=1))
        one_of("keep_dense", self.keep_dense, KEEP_DENSE)
        if self.favour is not None:
            one_of("favour", self.favour, FAVOURS)

    def left_out(
        self, tensors: Mapping[str, TensorInfo], folder: Path | None = None
    ) -> dict[str, str]:
        """The tensors that are not to be nested, and why.

        Args:
            tensors: All that the network has.
            folder: A model directory, whose embeddings, heads and the like are left out, too.
        """
        found = {name: not_chosen(name, self.include, self.exclude) for name in tensors}
        kinds = {} if folder is None or self.nest_all or self.include else unpruned(tensors, folder)
        return kinds | {name: why for name, why in found.items() if why is not None}


class SolvedTensor(NamedTuple):
    """A tensor of one level as it is stored."""

    name: str
    level: int
    """0: of the dense network, and every nested tensor; t: of level t alone."""
    array: NDArray[Any]


class Calibration(Checkpoint):
    """A network that is to be nested by calibration, with all tensors that it will have.

    Tensors that `solve` does not give are stored as they are.
    """

    levels: Sequence[Fraction | Pattern]
    nested: Sequence[str]
    """The tensors that carry counters."""
    per_level: Sequence[str]
    """The tensors of which every level has its own."""
    left: Mapping[str, str] = {}
    """Layers that are not nested, and why."""
    metrics: Mapping[str, MetricInfo] = {}
    """What every level and the dense network are measured by."""
    measured: Sequence[Mapping[str, float]] = ()
    """After `solve`: the metrics of each level, then of the dense network."""
    notes: Sequence[str] = ()
    """After `solve`: what the user should know."""
    defaults: Sequence[str] = ()
    """After `solve`: what was chosen because no option says otherwise."""

    @abstractmethod
    def solve(self, progress: Progress) -> Generator[SolvedTensor]:
        """Give every nested tensor, its counters in it, and the per-level ones that changed."""


class SolvedLevels(Assignment):
    """Levels that a calibration gives with their values, whole layers at a time."""

    def __init__(self, calibration: Calibration) -> None:
        self.calibration, self.metrics = calibration, calibration.metrics
        self.specs = specs_of(calibration.levels)
        levels = range(1, len(self.specs) + 1)
        variants = {variant_name(name, t) for name in calibration.per_level for t in levels}
        self._left = {*calibration.nested, *calibration.per_level} | variants

    def solve(self, append: Append, progress: Progress) -> None:
        """Store every tensor when its layer is solved."""
        with closing(self.calibration.solve(progress)) as solved:
            for name, level, array in solved:
                stored = self._stored_name(name, level, array)
                for block in array_blocks(array, BLOCK):
                    append(stored, block)
        tell(progress, "packing", "")
        network = self.calibration
        self.measured = network.measured
        self.notes, self.defaults = tuple(network.notes), tuple(network.defaults)

    def _stored_name(self, name: str, level: int, array: NDArray[Any]) -> str:
        """The name under which a tensor is stored; what the network has no place for is refused."""
        network = self.calibration
        where = f"{network.path}: calibration"
        stored = variant_name(name, level) if level else name
        if stored not in self._left:
            raise TensorMismatch(f"{where}: tensor {name!r} of level {level} has no place")
        self._left.remove(stored)
        info = network.tensors[name]
        same_tensor(info, TensorInfo(name, of_array(array.dtype), array.shape), where)
        if name in network.nested:
            words = words_of(array, info.dtype)
            refuse_unpackable(words, None, info.dtype, len(self.specs), f"{where}: tensor {name!r}")
        return stored

    def blocks(self, info: TensorInfo) -> Iterator[tuple[Words, Counters]]:
        """None are left: every nested tensor was solved."""
        raise TensorMismatch(
            f"{self.calibration.path}: calibration: tensor {info.name!r} was not solved"
        )


def not_chosen(name: str, include: Iterable[str], exclude: Iterable[str]) -> str | None:
    """Why patterns leave a tensor out, if they do.

    >>> not_chosen("head", ["h*"], ["*d"]), not_chosen("w", ["h*"], []), not_chosen("w", [], [])
    ('excluded', 'not included', None)
    """
    if any(fnmatchcase(name, pattern) for pattern in exclude):
        return "excluded"
    if include and not any(fnmatchcase(name, pattern) for pattern in include):
        return "not included"
    return None


def can_calibrate(source: Any) -> bool:
    """Whether there is a package that calibrates such a network."""
    from importlib.metadata import entry_points  # only here, as it takes long to import

    name = _door(source)
    return name is not None and bool(entry_points(group=GROUP, name=name))


def one_shot_notes(levels: Iterable[Fraction | Pattern], source: Any) -> Iterator[str]:
    """What helps, if levels by magnitude alone are sparser than pretrained networks usually bear.

    >>> next(one_shot_notes([Fraction(1, 4)], "net.npz"), None)
    """
    if all(zeros_of(level) <= BEARABLE for level in levels):
        return
    usual = "one-shot levels of a pretrained network usually need calibration above about 30 to 50%"
    if can_calibrate(source):
        yield f"{usual}; --calibrate SAMPLES does it"
    else:
        yield f"{usual}; pack its ONNX model or model directory with --calibrate"


def open_calibration(source: Any, samples: Any, options: CalibrationOptions) -> Calibration:
    """The network behind a path, ready to be calibrated; what cannot be is refused here."""
    where = os.fspath(source) if isinstance(source, str | os.PathLike) else "<arrays>"
    if (name := _door(source)) is not None:
        what = "model directories" if name == DIRECTORY else f".{name}"
        for calibrate in plugged_in(GROUP, name, f"{where}: calibrating {what}"):
            calibration: Calibration = calibrate(source, samples, options)
            return calibration
    raise InvalidOption(
        f"{where}: weights alone cannot be run",
        "{calibrate} needs the ONNX model or the model directory",
    )


def _door(source: Any) -> str | None:
    """The name under which a kind of network is registered, if it can be."""
    if not isinstance(source, str | os.PathLike) or is_url(source):
        return None
    return DIRECTORY if is_directory(source) else Path(source).suffix.lower().lstrip(".")
