"""Recipes: plain TOML files of flat values, each overridable on the command line.

A recipe may hold tables [global], [uniform] and [nm] with values for that scope alone. It is data:
it names data sets, models and algorithms that are bundled, never code (SECURITY.md).
"""

import dataclasses
import math
import operator
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from elsa_train._errors import BadRecipe, InvalidRecipe, TrainError
from elsa_train._levels import check_levels, parse_levels
from elsa_train._own import is_own
from elsa_train.data import NAMES

SCOPES = ("global", "uniform", "nm")
CHOICES: dict[str, tuple[str, ...]] = {
    "augment": ("crop-flip", "flip", "none", "shift"),
    "model": ("digits", "gpt", "resnet50", "speedyresnet", "wideresnet"),
    "scope": SCOPES,
    "sparsify": ("gmp", "acdc", "rigl"),
    "score": ("magnitude", "gradient", "saliency"),
    "method": ("sequential", "joint"),
    "start_masks": ("trained", "calibrated"),
    "rounding": ("nearest", "overwrite"),
    "optimizer": ("sgd", "adam", "adamw"),
    "judge": ("test", "validation"),
    "dtype": ("float32", "bfloat16"),
    "store_dtype": ("float32", "bfloat16", "float16"),
}
TEXT_MODELS = ("gpt",)
LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": operator.ge,
    "above": operator.gt,
    "at_most": operator.le,
    "below": operator.lt,
}
MOST_EPOCHS = 1e6
MOST = 2**31 - 1
"""Of whatever is counted: steps and seeds are 32-bit numbers on the device."""
LARGEST_FILE = 1 << 20


@dataclass(frozen=True)
class Measure:
    """A metric, and how it is shown.

    >>> ACCURACY.show(0.98765), LOSS.show(1.81449)
    ('98.77', '1.814')
    >>> LOSS.better(1.8, 2.3), ACCURACY.better(0.9, 0.9)
    (True, False)
    """

    metric: str
    axis: str
    scale: float
    digits: int
    higher: bool
    """Whether more of it is better."""
    unit: str = ""
    also: tuple[str, ...] = ()
    """Other names for the same, of `of_language`, that tables have too."""

    def show(self, value: float) -> str:
        """Write a value, or a difference of two."""
        return f"{self.scale * value:.{self.digits}f}"

    def better(self, one: float, other: float) -> bool:
        """Tell whether one value is better than another, not as good."""
        return one > other if self.higher else one < other


ACCURACY = Measure("accuracy", "accuracy, %", 100, 2, higher=True)
LOSS = Measure(
    "loss",
    "loss, nats per byte",
    1,
    3,
    higher=False,
    unit=", nats",
    also=("bits_per_byte", "perplexity"),
)


def of_language(loss: float) -> dict[str, float]:
    """Return what is told of a language model whose loss is in nats for each byte.

    >>> of_language(math.log(2))
    {'bits_per_byte': 1.0, 'loss': 0.6931471805599453, 'perplexity': 2.0}
    """
    # A file holds finite numbers only; a perplexity that large says no more than its loss.
    perplexity = math.exp(min(loss, 709.0))
    return {"bits_per_byte": loss / math.log(2), "loss": loss, "perplexity": perplexity}


def _is(default: Any, text: str, **limits: float) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **limits})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run, but for its seed and where its files go.

    >>> Recipe(dataset="fashion-mnist", scope="uniform").levels
    '95,90,80'
    >>> Recipe(dropout=7)
    Traceback (most recent call last):
    elsa_train._errors.BadRecipe: dropout: found 7.0, expected below 1
    """

    summary: str = _is("", "one line about the recipe")
    dataset: str = _is("digits", f"{', '.join(NAMES)}, or module:name of your own")
    data_dir: str = _is("", "where the data is")
    text: str = _is("", "dataset text: the file to learn, or Python's own documentation")
    augment: str = _is("none", "what changes training images: crop-flip, flip, shift or none")
    model: str = _is(
        "digits", "digits, speedyresnet, wideresnet, resnet50, gpt, or module:name of your own"
    )
    width: int = _is(0, "width of the model; 0 is the paper's", at_least=0, at_most=1 << 16)
    dropout: float = _is(0.0, "dropout rate", at_least=0, below=1)
    dtype: str = _is("float32", "type the network computes in")
    store_dtype: str = _is("float32", "type the weights are stored in")
    scope: str = _is("global", "which weights compete: global, uniform or nm")
    levels: str = _is("95,90,80", "sparsities in percent, a range 99..50, or N:M patterns")
    prune: str = _is("kernel$", "regular expression: tensors that lose weights")
    exclude: str = _is("", "regular expression: tensors that don't, though `prune` matches")
    axis: int = _is(
        -1, "axis of the N:M blocks: -1 along outputs, -2 along inputs", at_least=-64, at_most=63
    )
    bits: int = _is(0, "counter bits tau; 0 is as few as the levels need", at_least=0, at_most=8)
    rounding: str = _is("nearest", "how counters are written into the weights")
    score: str = _is("magnitude", "importance of a weight")
    sparsify: str = _is(
        "gmp",
        "how a level is pruned: gmp (gradually), acdc (sparse and dense by turns) or rigl (at "
        "once, then small weights give way to those of large gradient)",
    )
    method: str = _is("sequential", "how levels are trained: sequential (the paper's) or joint")
    start: str = _is(
        "", "initial network: a checkpoint of the model, an ELSA file or a run's folder"
    )
    start_masks: str = _is(
        "trained", "joint: levels are found in training, or calibrated in `start` and kept"
    )
    distill: bool = _is(False, "joint: learn the answers of `start`, not the labels")
    joint_dense: float = _is(
        0.25, "joint: part of the run before levels differ", at_least=0, at_most=1
    )
    joint_fixed: float = _is(
        0.3, "joint: part of the run, at its end, in which levels stay", at_least=0, at_most=1
    )
    joint_every: int = _is(10, "joint: steps between rankings", at_least=1, at_most=MOST)
    joint_shares: str = _is(
        "", "joint: steps of each level and of the dense network in a round, as 3,2,2,1"
    )
    updater: str = _is(
        "", "a jaxpruner algorithm as sparsify routine, instead of `sparsify` and `score`"
    )
    prune_start: float = _is(
        0.0, "part of a sparsify phase before its pruning starts", at_least=0, at_most=1
    )
    prune_end: float = _is(
        0.75, "part of a sparsify phase after which the mask stays", at_least=0, at_most=1
    )
    mask_every: int = _is(50, "steps between mask updates", at_least=1, at_most=MOST)
    one_shot: bool = _is(False, "prune at once, at prune_start, and train on")
    densify_between: bool = _is(True, "densify after each level, not only after the last")
    epochs: float = _is(
        30.0, "epochs of the initial dense network", at_least=0, at_most=MOST_EPOCHS
    )
    sparsify_epochs: float = _is(
        30.0, "epochs of each sparsify phase", above=0, at_most=MOST_EPOCHS
    )
    densify_epochs: float = _is(
        30.0, "epochs of each densify phase", at_least=0, at_most=MOST_EPOCHS
    )
    warmup_epochs: float = _is(
        3.0,
        "epochs in which the learning rate rises, in every phase",
        at_least=0,
        at_most=MOST_EPOCHS,
    )
    batch_size: int = _is(
        512, "images, or windows of text, per step, over all devices", at_least=1, at_most=MOST
    )
    learning_rate: float = _is(
        0.2, "peak learning rate for a batch of 256; scales with the batch", above=0
    )
    densify_factor: float = _is(
        0.01, "learning rate of the last densify over that of training", at_least=0
    )
    densify_between_factor: float = _is(
        0.01, "learning rate of densify between levels over that of training", at_least=0
    )
    optimizer: str = _is("sgd", "sgd, adam or adamw")
    momentum: float = _is(0.9, "momentum of SGD", at_least=0, below=1)
    nesterov: bool = _is(True, "Nesterov acceleration of SGD")
    weight_decay: float = _is(0.0005, "weight decay", at_least=0)
    decay: str = _is("", "regular expression: tensors with weight decay, by default all")
    label_smoothing: float = _is(0.1, "label smoothing", at_least=0, at_most=1)
    validation: float = _is(
        0.02,
        "part of the training images, or text, held out, to choose the final dense network by",
        at_least=0,
        below=1,
    )
    judge: str = _is(
        "test", "what levels are measured on: test, or validation while settings are chosen"
    )
    train_images: int = _is(
        0,
        "use only the first so many training images, or windows; 0 is all",
        at_least=0,
        at_most=MOST,
    )
    test_images: int = _is(
        0, "use only the first so many test images, or windows; 0 is all", at_least=0, at_most=MOST
    )

    def __post_init__(self) -> None:
        """Refuse values that no run could use."""
        for name, field in FIELDS.items():
            _check(name, self._typed(name, field), field)
        if not re.fullmatch(r"([0-9]{1,4}(,[0-9]{1,4})*)?", self.joint_shares):
            raise BadRecipe(
                f"joint_shares: found {self.joint_shares!r}, expected whole numbers as 3,2,2,1"
            )
        if self.joint_dense + self.joint_fixed > 1:
            raise BadRecipe("expected joint_dense + joint_fixed <= 1")
        if self.judge == "validation" and not self.validation:
            raise BadRecipe("judge: found 'validation', of which nothing is held out")
        if self.method == "joint" and self.updater:
            raise BadRecipe("updater: found one, which joint training can't use")
        clashes = (
            ("method", self.method == "joint"),
            ("updater", self.updater),
            ("one_shot", self.one_shot),
            ("score", self.sparsify == "rigl" and self.score != "magnitude"),
        )
        for name, clash in clashes:
            if clash and self.sparsify != "gmp":
                raise BadRecipe(
                    f"sparsify {self.sparsify!r} does not go with {name} {getattr(self, name)!r}"
                )
        if self.start_masks == "calibrated" and self.scope == "nm":
            raise BadRecipe("start_masks: found 'calibrated', which goes with scopes of sparsities")
        if self.prune_start > self.prune_end:
            raise BadRecipe("expected prune_start <= prune_end")
        if self.dataset not in NAMES and not is_own(self.dataset):
            raise BadRecipe(
                f"dataset: found {self.dataset!r}, expected one of {', '.join(NAMES)}, or "
                "module:name of your own"
            )
        fits = (self.dataset == "text") == (self.model in TEXT_MODELS)
        if not fits and not is_own(self.model):
            raise BadRecipe(f"model {self.model!r} does not go with dataset {self.dataset!r}")
        if self.text and self.dataset != "text":
            raise BadRecipe(f"text: found {self.text!r}, which dataset {self.dataset!r} can't use")
        check_levels(
            parse_levels(self.levels),
            bits=self.bits or None,
            dtype=self.store_dtype,
            pattern_scope=self.scope == "nm",
        )

    @property
    def source(self) -> str:
        """Return where the data is: a directory, or a file of text."""
        return self.text if self.dataset == "text" else self.data_dir

    @property
    def measure(self) -> Measure:
        """Return by which number a network is judged."""
        return LOSS if self.dataset == "text" else ACCURACY

    def _typed(self, name: str, field: "dataclasses.Field[Any]") -> Any:
        """Return a value of its field's type; whole numbers may stand for others."""
        value, wanted = getattr(self, name), type(field.default)
        if wanted is float and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                raise BadRecipe(f"{name}: too large a number") from None
            object.__setattr__(self, name, value)
        if type(value) is not wanted:
            raise BadRecipe(f"{name}: found {value!r}, expected {wanted.__name__}")
        return value


def _check(name: str, value: Any, field: "dataclasses.Field[Any]") -> None:
    own = name == "model" and is_own(value)
    if name in CHOICES and value not in CHOICES[name] and not own:
        raise BadRecipe(f"{name}: found {value!r}, expected one of {', '.join(CHOICES[name])}")
    if type(value) is float and not math.isfinite(value):
        raise BadRecipe(f"{name}: found {value}, expected a finite number")
    for limit, holds in LIMITS.items():
        if limit in field.metadata and not holds(value, field.metadata[limit]):
            words = f"{limit.replace('_', ' ')} {field.metadata[limit]:g}"
            raise BadRecipe(f"{name}: found {value}, expected {words}")
    if name in ("prune", "exclude", "decay"):
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise BadRecipe(f"{name}: {value!r} is no regular expression: {error}") from None
    if type(value) is str and "\0" in value:
        raise BadRecipe(f"{name}: found {value!r}, with a NUL in it")


FIELDS = {field.name: field for field in dataclasses.fields(Recipe)}


def recipe_names() -> list[str]:
    """List the bundled recipes."""
    folder = resources.files("elsa_train") / "recipes"
    return sorted(
        f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")
    )


def read_recipe(name: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a bundled recipe, or the file of that path, and replace some of its values.

    >>> read_recipe("digits", {"scope": "nm"}).levels
    '1:8,1:4,2:4'
    """
    if name in recipe_names():
        content = (resources.files("elsa_train") / "recipes" / f"{name}.toml").read_bytes()
    elif Path(name).suffix == ".toml":
        with open(name, "rb") as file:
            content = file.read(LARGEST_FILE + 1)
    else:
        raise BadRecipe(f"recipe {name!r}: expected a .toml file or one of {recipe_names()}")
    if len(content) > LARGEST_FILE:
        raise InvalidRecipe(f"{name}: larger than {LARGEST_FILE} bytes, which no recipe is")
    try:
        found = tomllib.loads(content.decode())
    except ValueError as error:
        raise InvalidRecipe(f"{name}: {error}") from None
    except RecursionError:
        raise InvalidRecipe(f"{name}: nested too deep") from None
    return make_recipe(found, overrides, name)


def make_recipe(
    found: dict[str, Any], overrides: dict[str, Any] | None = None, name: str = "recipe"
) -> Recipe:
    """Combine a file's values, those of its scope, and overrides: the file's can name no code."""
    overrides = overrides or {}
    tables = {key: value for key, value in found.items() if isinstance(value, dict)}
    top = {key: value for key, value in found.items() if key not in tables}
    if unknown := set(tables) - set(SCOPES):
        raise InvalidRecipe(f"{name}: unknown table [{min(unknown)}]")
    usual = top.get("scope", "global")
    if usual not in SCOPES:
        raise InvalidRecipe(f"{name}: scope: found {usual!r}, expected one of {', '.join(SCOPES)}")
    recipes = {scope: _of_file(name, top, table, scope) for scope, table in tables.items()}
    if usual not in tables and ("scope" in top or not tables):
        recipes[usual] = _of_file(name, top, {}, usual)
    scope = overrides.get("scope", usual)
    if scope not in recipes and (tables or scope not in SCOPES):
        raise BadRecipe(f"{name}: has no scope {scope!r}, only {', '.join(recipes)}")
    if unknown := set(overrides) - set(FIELDS):
        raise BadRecipe(f"unknown value {min(unknown)!r}")
    return dataclasses.replace(recipes.get(scope) or recipes[usual], **overrides)


def _of_file(name: str, top: dict[str, Any], table: dict[str, Any], scope: str) -> Recipe:
    if "scope" in table:
        raise InvalidRecipe(f"{name}: scope: found in table [{scope}], expected above the tables")
    values = {**top, **table, "scope": scope}
    if unknown := set(values) - set(FIELDS):
        raise InvalidRecipe(f"{name}: unknown value {min(unknown)!r}")
    try:
        recipe = Recipe(**values)
    except (TrainError, RecursionError) as error:
        raise InvalidRecipe(f"{name}: {error}") from None
    for key, known in (("dataset", NAMES), ("model", CHOICES["model"])):
        if (value := getattr(recipe, key)) not in known:
            raise InvalidRecipe(
                f"{name}: {key}: found {value!r}, which would run code; a file names one of "
                f"{', '.join(known)}, and --{key} your own"
            )
    return recipe
