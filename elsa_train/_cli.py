"""`elsa-train RECIPE`: train, or `recalibrate` a file. JAX is imported only when work starts."""

import glob
import json
import logging
import math
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from elsa_format import ElsaError
from elsa_format.cli import (
    SETTINGS,
    VERSION,
    columns,
    escape,
    install_command,
    needs_extra,
    reports_errors,
    say,
    wrap,
)
from elsa_format.cli import table as aligned
from elsa_train._commands import NEEDED, OwnType, Renamed, evaluate, recalibrate, using_jax
from elsa_train._errors import TrainError
from elsa_train._levels import parse_levels
from elsa_train._own import find_own, is_own
from elsa_train._recipe import CHOICES, FIELDS, MOST, Recipe, read_recipe, recipe_names
from elsa_train.data import NAMES, READY


class _Recipes(click.Group):
    """A group in which every recipe, bundled or a .toml file, is a command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*recipe_names(), *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = super().get_command(ctx, name)
        if found is None and (name in recipe_names() or name.endswith(".toml")):
            return _recipe_command(name)
        return found

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        files = sorted(glob.glob(f"{glob.escape(incomplete)}*.toml"))
        return [*super().shell_complete(ctx, incomplete), *map(CompletionItem, files)]


@needs_extra("train", "training", NEEDED, free=["list"])
@click.group("train", cls=_Recipes, context_settings=SETTINGS)
@VERSION
def train() -> None:
    """Train sparse networks nested in one dense checkpoint.

    Each command but `evaluate`, `list` and `recalibrate` is a recipe; so is the path of a .toml
    file.
    Every value of a recipe is an option: `elsa-train digits --help` lists them with their defaults.
    """


def _recipe_command(name: str) -> click.Command:
    try:
        recipe = read_recipe(name)
    except (ElsaError, OSError) as error:
        return _failing_command(name, error)
    return click.Command(
        name,
        params=[*_run_options(), *_recipe_options(recipe)],
        callback=lambda **values: _train(name, **values),
        help=escape(recipe.summary),
        context_settings={**SETTINGS, "show_default": True},
    )


def _failing_command(name: str, error: Exception) -> click.Command:
    """A command that says what is wrong with its recipe, whatever its options."""

    @reports_errors
    def fail() -> None:
        raise error

    return click.Command(
        name,
        callback=fail,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )


def _run_options() -> list[click.Parameter]:
    return [
        Renamed(
            ["-o", "--output", "out"],
            former="--out",
            type=click.Path(),
            metavar="FOLDER",
            help="folder of the run  [runs/RECIPE-SCOPE, with -joint for joint training]",
        ),
        click.Option(["--seed"], type=click.IntRange(0, MOST // 2), default=0, help="first seed"),
        click.Option(
            ["--seeds"], type=click.IntRange(1, 10_000), default=1, help="how many seeds to run"
        ),
        click.Option(
            ["--reference/--no-reference"],
            default=False,
            help="also prune the initial network to each level independently",
        ),
        click.Option(
            ["--equal-epochs/--no-equal-epochs"],
            default=False,
            help="also train references for as many epochs as ELSA had by that level",
        ),
        click.Option(
            ["--alone/--no-alone"],
            default=False,
            help="also train each level alone, from scratch, for as many steps as the whole run",
        ),
        click.Option(
            ["--alone-levels"],
            metavar="NAMES",
            help="with --alone, only these, as 99%,75%,dense  [all]",
            show_default=False,
        ),
        click.Option(["--checkpoint-every"], type=click.IntRange(1), default=500, help="in steps"),
        click.Option(
            ["--checkpoint-minutes"],
            type=click.FloatRange(0, min_open=True),
            help="also save after so many minutes  [never]",
            show_default=False,
        ),
        click.Option(
            ["--tensorboard/--no-tensorboard"],
            default=False,
            help="also write metrics for TensorBoard, into the run's folder",
        ),
        click.Option(
            ["--metrics-hook"],
            metavar="MODULE:NAME",
            help="also give metrics to your own function; NAME(recipe, seed) returns it",
            show_default=False,
        ),
        Renamed(
            ["-f", "--force", "restart"],
            former="--restart",
            is_flag=True,
            help="start over: replace the run in the folder",
        ),
        click.Option(
            ["--plot"],
            type=click.Choice(["none", "png", "svg"]),
            default="png",
            help="accuracy (of text: loss) over sparsity, and learning curves",
        ),
        click.Option(
            ["--changed-data"],
            is_flag=True,
            help="resume a run although its data has changed",
        ),
        click.Option(
            ["--workers"],
            type=click.IntRange(0, 1024),
            help="processes that make batches  [a core each where images are decoded, else 0]",
            show_default=False,
        ),
        click.Option(["--coordinator"], help="host:port of process 0, for runs over several hosts"),
        click.Option(["--processes"], type=click.IntRange(1), default=1, help="how many in all"),
        click.Option(["--process"], type=click.IntRange(0), default=0, help="number of this one"),
        click.Option(
            ["--distributed"],
            is_flag=True,
            help="run over the hosts that JAX finds by itself, as on TPUs and with SLURM",
        ),
        click.Option(["--json", "as_json"], is_flag=True, help="print the results as JSON"),
        click.Option(["-q", "--quiet"], is_flag=True, help="no progress, no summary"),
    ]


def _recipe_options(recipe: Recipe) -> list[click.Parameter]:
    options: list[click.Parameter] = []
    for key, field in FIELDS.items():
        if key == "summary":
            continue
        flag = key.replace("_", "-")
        kind: Any = type(field.default)
        value = escape(str(getattr(recipe, key)))
        declared = [f"--{flag}", key]
        if kind is bool:
            value, declared[0] = value.lower(), f"--{flag}/--no-{flag}"
        elif key == "model":
            kind = OwnType(CHOICES[key])
        elif key in CHOICES:
            kind = click.Choice(CHOICES[key])
        elif key == "dataset":
            kind = OwnType(NAMES)
        elif key in ("data_dir", "text"):
            kind = click.Path()
        # Not a default of the option: a scope given beside it may bring its own.
        text = f"{field.metadata['help']}  [{value}]"
        options.append(
            click.Option(declared, type=kind, default=None, help=text, show_default=False)
        )
    return options


@reports_errors
def _train(
    name: str,
    *,
    out: str | None,
    seed: int,
    seeds: int,
    reference: bool,
    equal_epochs: bool,
    alone: bool,
    alone_levels: str | None,
    checkpoint_every: int,
    checkpoint_minutes: float | None,
    tensorboard: bool,
    metrics_hook: str | None,
    restart: bool,
    plot: str,
    changed_data: bool,
    workers: int | None,
    coordinator: str | None,
    processes: int,
    process: int,
    distributed: bool,
    as_json: bool,
    quiet: bool,
    **values: Any,
) -> None:
    given = {key: value for key, value in values.items() if value is not None}
    recipe = read_recipe(name, given)
    stem = Path(name).stem
    title = f"{stem}, {recipe.scope}" + (", joint" if recipe.method == "joint" else "")
    if out == "-":
        raise click.UsageError("-o - is standard output, but a run has a folder: name one.")
    folder = Path(out or f"runs/{title.replace(', ', '-')}")
    try:
        str(folder.absolute()).encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"--output: {str(folder)!r} is not UTF-8.") from None
    _check_folder(str(out or ""))
    _check_hosts(coordinator, processes, process, distributed)
    only = _alone_levels(recipe, alone, alone_levels)
    hook = None
    if metrics_hook is not None:
        if not is_own(metrics_hook):
            raise click.UsageError(f"--metrics-hook: {metrics_hook!r} is not module:name.")
        hook = find_own("metrics hook", metrics_hook, "to call with the recipe's values and a seed")
    with using_jax():
        import jax

        if coordinator:
            jax.distributed.initialize(coordinator, processes, process)
        elif distributed:
            _join_hosts()
        first = jax.process_index() == 0

        from elsa_train import _report
        from elsa_train._folder import Output, replacing
        from elsa_train._run import run_seed
        from elsa_train._tensorboard import TensorBoard

        # What orbax cannot write it also logs, with tracebacks of its threads.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        table, chart = folder / "table.md", folder / f"{recipe.measure.metric}.{plot}"
        curves = {n: folder / f"seed-{n}" / f"curves.{plot}" for n in range(seed, seed + seeds)}
        plots = plot != "none"
        outputs = {
            n: Output(
                path.parent,
                checkpoint_every,
                (table, chart, path) if plots else (table,),
                changed_data,
                checkpoint_minutes or math.inf,
            )
            for n, path in curves.items()
        }
        wanted = {"reference": reference, "equal_epochs": equal_epochs, "alone": alone}
        also = [column for column, is_wanted in wanted.items() if is_wanted]
        found = []
        for number, output in outputs.items():
            hooks = []
            if first and tensorboard:
                hooks.append(TensorBoard(output.folder / "tensorboard"))
            if first and hook is not None:
                hooks.append(hook(asdict(recipe), number))
            reporter = _report.Reporter(
                None if quiet or not first else sys.stderr, output.metrics if first else None, hooks
            )
            try:
                found.append(
                    run_seed(
                        recipe,
                        number,
                        output,
                        reporter,
                        restart=restart,
                        columns=also,
                        only=only,
                        workers=workers,
                    )
                )
            finally:
                reporter.close()
        if not first:
            return
        cells = _report.cells(found, recipe.measure)
        text = _report.markdown(cells)
        with replacing(table) as temporary:
            temporary.write_text(text, "utf-8")
        if plots:
            try:
                _report.plot(found, chart, title, recipe.measure)
                for number, output in outputs.items():
                    _report.plot_curves(output.metrics, curves[number], title)
            except ModuleNotFoundError as error:
                if not quiet:
                    say(
                        f"no plot: {error.name} is not installed; run: {install_command('plot')}",
                        err=True,
                    )
    if as_json:
        runs = [
            {"seed": number, "model": str(output.model), "levels": [asdict(row) for row in rows]}
            for (number, output), rows in zip(outputs.items(), found, strict=True)
        ]
        say(json.dumps({"output": str(folder), "runs": runs}, indent=2))
    elif not quiet:
        width = columns()
        if width is None or max(map(len, text.splitlines())) <= width:
            say(text.rstrip("\n"))
        else:
            say(aligned(cells, width=width))
            say(f"wrote {table}", err=True)
        for output in outputs.values():
            say(f"wrote {output.model}", err=True)


def _alone_levels(recipe: Recipe, alone: bool, given: str | None) -> list[str] | None:
    if given is None:
        return None
    if not alone:
        raise click.UsageError("--alone-levels goes with --alone.")
    known = [*(level.name for level in parse_levels(recipe.levels)), "dense"]
    wanted = [name.strip() for name in given.split(",")]
    for name in wanted:
        if name not in known:
            raise click.UsageError(f"--alone-levels: {name!r} is not one of {', '.join(known)}.")
    return wanted


def _check_folder(out: str) -> None:
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", out):
        raise click.UsageError(
            f"--output {out}: checkpoints need a folder; give one, and copy "
            "seed-0/model.safetensors when it is done."
        )


def _join_hosts() -> None:
    import jax

    try:
        jax.distributed.initialize()
    except ValueError as error:
        first, *_ = str(error).splitlines() or [""]
        raise TrainError(
            f"--distributed: JAX finds no hosts here ({first}); use --coordinator, --processes and "
            "--process"
        ) from None


def _check_hosts(coordinator: str | None, processes: int, process: int, distributed: bool) -> None:
    if distributed and coordinator is not None:
        raise click.UsageError("--distributed finds the hosts itself; leave out --coordinator.")
    if coordinator is None and (processes, process) != (1, 0):
        raise click.UsageError("--processes and --process go with --coordinator.")
    if coordinator is not None and not re.fullmatch(r"\S+:[0-9]{1,5}", coordinator):
        raise click.UsageError(f"--coordinator: {coordinator!r} is not host:port.")
    if process >= processes:
        raise click.UsageError(f"--process {process} is not one of {processes}: they count from 0.")


@train.command("list", context_settings=SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="print the recipes as JSON")
def list_recipes(as_json: bool) -> None:
    """List the recipes: what each trains, on which data, to which levels."""
    recipes = {name: read_recipe(name) for name in recipe_names()}
    if as_json:
        say(json.dumps({name: asdict(recipe) for name, recipe in recipes.items()}, indent=2))
        return
    wide, width = max(map(len, recipes)), columns()
    for name, recipe in recipes.items():
        data = "" if recipe.dataset in READY else "; needs --data-dir"
        text = f"{name:<{wide}}  {escape(recipe.summary)}{data}"
        say(wrap(text, width, indent=wide + 2))
        say(f"{'':<{wide}}  {recipe.scope}: levels {recipe.levels}")


train.add_command(evaluate)
train.add_command(recalibrate)


def main() -> None:
    """Run as `elsa-train`."""
    train(prog_name="elsa-train")
