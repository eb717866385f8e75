"""`elsa-train RECIPE`: train, or `recalibrate` a file. JAX is imported only when work starts."""

import shutil
from pathlib import Path
from typing import Any

import click

from elsa_format import ElsaError
from elsa_train._recipe import CHOICES, FIELDS, read_recipe, recipe_names

NEEDED = ("jax", "flax", "optax", "orbax", "sklearn", "PIL")
"""What the extra `train` brings."""


class _Recipes(click.Group):
    """A group in which every recipe, bundled or a .toml file, is a command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*recipe_names(), *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        found = super().get_command(ctx, name)
        if found is None and (name in recipe_names() or name.endswith(".toml")):
            return _recipe_command(name)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ElsaError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package not in NEEDED:
                raise
            text = f"error: training needs {package}; pip install 'elsa-format[train]'"
            click.echo(text, err=True)
            ctx.exit(1)


@click.group(cls=_Recipes, context_settings={"show_default": True})
def main() -> None:
    """Train sparse networks nested in one dense checkpoint.

    Each command but `recalibrate` is a recipe; the path of a .toml file is one too. Every value of
    a recipe is an option: `elsa-train digits --help` lists them with their defaults.
    """


def _recipe_command(name: str) -> click.Command:
    try:
        recipe = read_recipe(name)
    except ElsaError as error:
        raise click.UsageError(str(error)) from None
    options: list[click.Parameter] = [
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            help="folder of the run  [runs/RECIPE-SCOPE]",
        ),
        click.Option(["--seed"], type=int, default=0, help="first seed"),
        click.Option(["--seeds"], type=click.IntRange(1), default=1, help="how many seeds to run"),
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
        click.Option(["--checkpoint-every"], type=click.IntRange(1), default=500, help="in steps"),
        click.Option(["--restart"], is_flag=True, help="forget an unfinished run in the folder"),
        click.Option(
            ["--plot"],
            type=click.Choice(["none", "png", "svg"]),
            default="png",
            help="accuracy over sparsity",
        ),
        click.Option(["--coordinator"], help="host:port of process 0, for runs over several hosts"),
        click.Option(["--processes"], type=click.IntRange(1), default=1, help="how many in all"),
        click.Option(["--process"], type=click.IntRange(0), default=0, help="number of this one"),
        click.Option(["--quiet"], is_flag=True, help="no progress"),
    ]
    for key, field in FIELDS.items():
        if key == "summary":
            continue
        flag = key.replace("_", "-")
        kind, value = type(field.default), getattr(recipe, key)
        # Not a default of the option: a scope given beside it may bring its own.
        text = f"{field.metadata['help']}  [{str(value).lower() if kind is bool else value}]"
        if kind is bool:
            options.append(
                click.Option(
                    [f"--{flag}/--no-{flag}", key],
                    default=None,
                    help=text,
                    show_default=False,
                )
            )
        else:
            choice = click.Choice(CHOICES[key]) if key in CHOICES else kind
            options.append(
                click.Option(
                    [f"--{flag}", key],
                    type=choice,
                    help=text,
                    show_default=False,
                )
            )
    return click.Command(
        name,
        params=options,
        callback=lambda **values: _train(name, **values),
        help=recipe.summary,
        context_settings={"show_default": True},
    )


def _train(
    name: str,
    *,
    out: Path | None,
    seed: int,
    seeds: int,
    reference: bool,
    equal_epochs: bool,
    checkpoint_every: int,
    restart: bool,
    plot: str,
    coordinator: str | None,
    processes: int,
    process: int,
    quiet: bool,
    **values: Any,
) -> None:
    given = {key: value for key, value in values.items() if value is not None}
    recipe = read_recipe(name, given)
    folder = out or Path("runs") / f"{Path(name).stem}-{recipe.scope}"

    import jax

    if coordinator:
        jax.distributed.initialize(coordinator, processes, process)
    first = jax.process_index() == 0

    from elsa_train import _report
    from elsa_train._run import Output, run_seed

    found = []
    for number in range(seed, seed + seeds):
        output = Output(folder / f"seed-{number}", checkpoint_every)
        if restart and first:
            shutil.rmtree(output.folder, ignore_errors=True)
        output.folder.mkdir(parents=True, exist_ok=True)
        lines = output.folder / "metrics.jsonl" if first else None
        reporter = _report.Reporter(lines=lines, every=float("inf") if quiet or not first else None)
        try:
            found.append(
                run_seed(
                    recipe,
                    number,
                    output,
                    reporter,
                    reference=reference,
                    equal_epochs=equal_epochs,
                )
            )
        finally:
            reporter.close()
    if not first:
        return
    text = _report.table(found)
    (folder / "table.md").write_text(text, "utf-8")
    click.echo(text, nl=False)
    if plot != "none":
        try:
            _report.plot(found, folder / f"accuracy.{plot}", f"{Path(name).stem}, {recipe.scope}")
        except ModuleNotFoundError as error:
            missing = f"no plot: {error.name} is not installed; pip install 'elsa-format[plot]'"
            click.echo(missing, err=True)
    for number in range(seed, seed + seeds):
        click.echo(f"wrote {folder / f'seed-{number}' / 'model.safetensors'}", err=True)


@main.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--level", required=True, help="number or name of the level, or dense")
@click.option("--data", "dataset", required=True, help="data set whose training images to use")
@click.option("--data-dir", default="", help="where the data is")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--images", type=click.IntRange(1), default=1024, help="how many images to use")
@click.option("--batch-size", type=click.IntRange(1), default=128)
@click.option("--force", is_flag=True, help="replace the output if it exists")
def recalibrate(
    file: Path,
    level: str,
    dataset: str,
    data_dir: str,
    out: Path,
    images: int,
    batch_size: int,
    force: bool,
) -> None:
    """Recompute a level's batch-norm statistics from unlabeled data."""
    from elsa_train import _recalibrate
    from elsa_train.data import load

    _recalibrate.recalibrate(
        file,
        out,
        level=level,
        data=load(dataset, data_dir),
        images=images,
        batch_size=batch_size,
        force=force,
    )
    click.echo(f"wrote {out}", err=True)


# The name under which it joins the `elsa` group.
train = main
