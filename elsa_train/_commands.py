"""Commands on a trained file: `elsa-train evaluate` and `recalibrate`. JAX is imported late."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem

from elsa_format import MissingExtra
from elsa_format.cli import SETTINGS, columns, reports_errors, say, standard_output, table
from elsa_train._errors import TrainError
from elsa_train._recipe import CHOICES
from elsa_train.data import NAMES

NEEDED = ("jax", "flax", "optax", "orbax", "sklearn", "PIL")
"""What the extra `train` brings."""


class Renamed(click.Option):
    """An option whose former name still works, unseen."""

    def __init__(self, *args: Any, former: str, **settings: Any) -> None:
        """Take the former name."""
        super().__init__(*args, **settings)
        self._former = former

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser know both names."""
        shown = self.opts
        self.opts = [*shown, self._former]
        super().add_to_parser(parser, ctx)
        self.opts = shown


class OwnType(click.ParamType):  # type: ignore[type-arg]
    """What is bundled, or module:name."""

    name = "name"

    def __init__(self, bundled: Sequence[str]) -> None:
        """Take the names of what is bundled."""
        self._bundled = bundled

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the names of what is bundled."""
        return [CompletionItem(name) for name in self._bundled if name.startswith(incomplete)]


@contextmanager
def using_jax() -> Iterator[None]:
    """Say in one line what is missing, or what the devices could not do."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package not in NEEDED:
            raise
        raise MissingExtra.of(error, "training", "train") from None
    except RuntimeError as error:
        jax = sys.modules.get("jax")
        if jax is None or not isinstance(error, jax.errors.JaxRuntimeError):
            raise
        first, *_ = str(error).splitlines() or [""]
        raise TrainError(first) from None


@click.command(context_settings={**SETTINGS, "show_default": True})
@click.argument("source", metavar="SRC", type=click.Path(dir_okay=False))
@click.option("-l", "--level", required=True, help="number or name of the level, or dense")
@click.option(
    "--dataset",
    cls=Renamed,
    former="--data",
    type=OwnType(NAMES),
    required=True,
    help="data set whose training images to use",
)
@click.option("--data-dir", type=click.Path(), default="", help="where the data is")
@click.option(
    "--model",
    type=OwnType(CHOICES["model"]),
    help="the network, where the file names none, or one of your own  [the file's]",
    show_default=False,
)
@click.option(
    "-o",
    "--output",
    "target",
    cls=Renamed,
    former="--out",
    metavar="OUT",
    required=True,
    help="file, or - for stdout",
)
@click.option("--images", type=click.IntRange(1), default=1024, help="how many images to use")
@click.option("--batch-size", type=click.IntRange(1), default=128)
@click.option("-f", "--force", is_flag=True, help="replace OUT if it exists")
@click.option("--json", "as_json", is_flag=True, help="print what was written as JSON")
@click.option("-q", "--quiet", is_flag=True, help="print no summary")
@reports_errors
def recalibrate(
    source: str,
    target: str,
    level: str,
    dataset: str,
    data_dir: str,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Recompute a level's batch-norm statistics from unlabeled data.

    \b
    elsa-train recalibrate net.safetensors --level 95% --dataset digits -o new.safetensors
    """
    with using_jax():
        from elsa_train import _recalibrate
        from elsa_train.data import load

        number = _recalibrate.recalibrate(
            source,
            standard_output() if target == "-" else target,
            level=level,
            data=load(dataset, data_dir),
            **options,
        )
    if as_json:
        say(json.dumps({"output": target, "level": number}), err=target == "-")
    elif not quiet and target != "-":
        say(f"{target}: level {number} has new statistics", err=True)


@click.command(context_settings={**SETTINGS, "show_default": True})
@click.argument("source", metavar="SRC", type=click.Path(dir_okay=False))
@click.option(
    "-l",
    "--level",
    "levels",
    multiple=True,
    help="number or name of a level, or dense; may be repeated  [all]",
    show_default=False,
)
@click.option(
    "--dataset",
    type=OwnType(NAMES),
    help="data set whose test examples to use  [the file's]",
    show_default=False,
)
@click.option("--data-dir", type=click.Path(), default="", help="where the data is")
@click.option(
    "--model",
    type=OwnType(CHOICES["model"]),
    help="the network, where the file names none, or one of your own  [the file's]",
    show_default=False,
)
@click.option("--limit", type=click.IntRange(1), help="use only the first so many examples")
@click.option("--json", "as_json", is_flag=True, help="print the metrics as JSON")
@reports_errors
def evaluate(source: str, levels: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Measure levels of a file on test data.

    \b
    elsa-train evaluate net.safetensors --level 95%
    elsa-train evaluate net.safetensors --dataset cifar10 --data-dir DIR
    """
    with using_jax():
        from elsa_train._recalibrate import evaluate as measure

        found = measure(source, levels, **options)
    if as_json:
        say(json.dumps({"source": source, "levels": found}, indent=2))
        return
    heads = list(dict.fromkeys(name for row in found for name in row["metrics"]))
    rows = [[str(row["level"]), row["name"]] for row in found]
    for row, entry in zip(rows, found, strict=True):
        row += [f"{entry['metrics'][name]:.5g}" for name in heads]
    say(table([["level", "name", *heads], *rows], width=columns()))
