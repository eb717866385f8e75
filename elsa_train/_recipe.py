"""Recipes: plain TOML files of flat values, each overridable on the command line.

A recipe may hold tables [global], [uniform] and [nm] with values for that scope alone.
"""

import dataclasses
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from elsa_train._errors import BadRecipe

SCOPES = ("global", "uniform", "nm")
CHOICES: dict[str, tuple[str, ...]] = {
    "scope": SCOPES,
    "score": ("magnitude", "gradient", "saliency"),
    "rounding": ("nearest", "overwrite"),
    "optimizer": ("sgd", "adam", "adamw"),
    "dtype": ("float32", "bfloat16"),
    "store_dtype": ("float32", "bfloat16", "float16"),
}


def _is(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run, but for its seed and where its files go.

    >>> Recipe(dataset="fashion-mnist", scope="uniform").levels
    '95,90,80'
    """

    summary: str = _is("", "one line about the recipe")
    dataset: str = _is(
        "digits",
        "digits, mnist, fashion-mnist, cifar10, cifar100, imagefolder, "
        "or module:function of your own",
    )
    data_dir: str = _is("", "where the data is")
    augment: str = _is("none", "crop-flip, flip, shift or none")
    model: str = _is("digits", "digits, speedyresnet, wideresnet or resnet50")
    width: int = _is(0, "width of the model; 0 is the paper's")
    dropout: float = _is(0.0, "dropout rate")
    dtype: str = _is("float32", "type the network computes in")
    store_dtype: str = _is("float32", "type the weights are stored in")
    scope: str = _is("global", "which weights compete: global, uniform or nm")
    levels: str = _is("95,90,80", "sparsities in percent, a range 99..50, or N:M patterns")
    prune: str = _is("kernel$", "regular expression: tensors that lose weights")
    exclude: str = _is("", "regular expression: tensors that don't, though `prune` matches")
    axis: int = _is(-1, "axis of the N:M blocks")
    bits: int = _is(0, "counter bits tau; 0 is as few as the levels need")
    rounding: str = _is("nearest", "how counters are written into the weights")
    score: str = _is("magnitude", "importance of a weight")
    updater: str = _is("", "a jaxpruner algorithm as sparsify routine, instead of `score`")
    prune_start: float = _is(0.0, "part of a sparsify phase before its pruning starts")
    prune_end: float = _is(0.75, "part of a sparsify phase after which the mask stays")
    mask_every: int = _is(50, "steps between mask updates")
    one_shot: bool = _is(False, "prune at once, at prune_start, and train on")
    densify_between: bool = _is(True, "densify after each level, not only after the last")
    epochs: float = _is(30.0, "epochs of the initial dense network")
    sparsify_epochs: float = _is(30.0, "epochs of each sparsify phase")
    densify_epochs: float = _is(30.0, "epochs of each densify phase")
    warmup_epochs: float = _is(3.0, "epochs in which the learning rate rises, in every phase")
    batch_size: int = _is(512, "images per step, over all devices")
    learning_rate: float = _is(0.2, "peak learning rate for a batch of 256; scales with the batch")
    densify_factor: float = _is(0.01, "learning rate of densify over that of training")
    optimizer: str = _is("sgd", "sgd, adam or adamw")
    momentum: float = _is(0.9, "momentum of SGD")
    nesterov: bool = _is(True, "Nesterov acceleration of SGD")
    weight_decay: float = _is(0.0005, "weight decay")
    label_smoothing: float = _is(0.1, "label smoothing")
    train_images: int = _is(0, "use only the first so many training images; 0 is all")
    test_images: int = _is(0, "use only the first so many test images; 0 is all")

    def __post_init__(self) -> None:
        """Refuse values that no run could use."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise BadRecipe(
                    f"{name}: found {getattr(self, name)!r}, expected one of {', '.join(allowed)}"
                )
        for name in ("batch_size", "mask_every", "sparsify_epochs", "learning_rate"):
            if not getattr(self, name) > 0:
                raise BadRecipe(f"{name}: found {getattr(self, name)}, expected more than 0")
        for name in ("epochs", "densify_epochs", "warmup_epochs", "weight_decay", "densify_factor"):
            if not getattr(self, name) >= 0:
                raise BadRecipe(f"{name}: found {getattr(self, name)}, expected 0 or more")
        if not 0 <= self.prune_start <= self.prune_end <= 1:
            raise BadRecipe("expected 0 <= prune_start <= prune_end <= 1")


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
        text = (resources.files("elsa_train") / "recipes" / f"{name}.toml").read_text("utf-8")
    elif Path(name).suffix == ".toml":
        try:
            text = Path(name).read_text("utf-8")
        except OSError as error:
            raise BadRecipe(f"{name}: {error.strerror}") from None
    else:
        raise BadRecipe(f"recipe {name!r}: expected a .toml file or one of {recipe_names()}")
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadRecipe(f"{name}: {error}") from None
    return make_recipe(found, overrides, name)


def make_recipe(
    found: dict[str, Any], overrides: dict[str, Any] | None = None, name: str = "recipe"
) -> Recipe:
    """Combine a recipe's values, those of its scope, and overrides, each checked for its type."""
    overrides = overrides or {}
    tables = {key: value for key, value in found.items() if isinstance(value, dict)}
    if unknown := set(tables) - set(SCOPES):
        raise BadRecipe(f"{name}: unknown table [{min(unknown)}]")
    scope = overrides.get("scope", found.get("scope", "global"))
    if tables and scope in SCOPES and scope not in tables and scope != found.get("scope"):
        raise BadRecipe(f"{name}: has no scope {scope!r}, only {', '.join(tables)}")
    top = {key: value for key, value in found.items() if key not in tables}
    values = top | tables.get(scope, {}) | overrides | {"scope": scope}
    for key, value in values.items():
        if key not in FIELDS:
            raise BadRecipe(f"{name}: unknown value {key!r}")
        wanted = type(FIELDS[key].default)
        if wanted is float and type(value) is int:
            values[key] = value = float(value)
        if type(value) is not wanted:
            raise BadRecipe(f"{name}: {key}: found {value!r}, expected {wanted.__name__}")
    return Recipe(**values)
