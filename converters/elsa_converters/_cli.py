"""elsa-export: a level, or all of them, as a model of another format."""

import os
import sys
from typing import Any

import click

from elsa_converters._errors import TemplateMismatch
from elsa_format import ElsaError
from elsa_format._cli._terminal import (
    SETTINGS,
    LevelType,
    SizeType,
    SparsityType,
    progress,
    reports_errors,
    show_size,
)


@click.command("export", context_settings=SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path(dir_okay=False, allow_dash=True))
@click.option(
    "--onnx",
    "template",
    metavar="TEMPLATE",
    required=True,
    type=click.Path(dir_okay=False),
    help="The graph: a template, or any ONNX model with the same weights.",
)
@click.option("-l", "--level", type=LevelType(), help="The level: 1 (sparsest) to T, or dense.")
@click.option(
    "--sparsity", type=SparsityType(), help="The densest level with at least this many zeros."
)
@click.option("--max-size", type=SizeType(), help="The densest level whose model is not larger.")
@click.option("--all-levels", is_flag=True, help="One small graph that runs any level of SRC.")
@click.option("--level-input", is_flag=True, help="With --all-levels: every run chooses its level.")
@click.option("--sparse", is_flag=True, help="Sparse initializers where they are smaller.")
@click.option("--fold-batch-norm", "fold", is_flag=True, help="Fold batch norm into convolutions.")
@click.option(
    "--external-data",
    is_flag=True,
    default=None,
    help="Weights in OUT.data beside the model; always above 2 GB.",
)
@click.option(
    "-o", "--output", "target", metavar="OUT", required=True, help="File, or - for stdout."
)
@click.option("--no-verify", is_flag=True, help="Do not compare checksums.")
@click.option("-f", "--force", is_flag=True, help="Replace OUT if it exists.")
@reports_errors
def export(
    source: str,
    template: str,
    target: str,
    all_levels: bool,
    level_input: bool,
    no_verify: bool,
    force: bool,
    **options: Any,
) -> None:
    """Write one level of an ELSA file as an ONNX model, or a graph that runs any of them.

    \b
    elsa-export net.safetensors --onnx net.onnx --level 2 -o level2.onnx
    elsa-export net.safetensors --onnx net.onnx --sparsity 90 --sparse -o small.onnx
    elsa-export net.safetensors --onnx net.onnx --all-levels -o levels.onnx
    """
    wishes = [name for name in ("level", "sparsity", "max_size") if options[name] is not None]
    if len(wishes) + all_levels != 1:
        raise click.UsageError("Give one of --level, --sparsity, --max-size and --all-levels.")
    others = [name for name in ("sparse", "fold", "external_data") if options[name]]
    if all_levels and (others or no_verify or "-" in (source, target)):
        raise click.UsageError("--all-levels points into the file SRC, and takes no such option.")
    if level_input and not all_levels:
        raise click.UsageError("--level-input belongs to --all-levels.")
    onnx = _onnx()
    try:
        if all_levels:
            onnx.export_all_levels(source, template, target, level_input=level_input, force=force)
            size = show_size(os.path.getsize(target))
            click.echo(f"{target}: all levels, {size} beside {source}", err=True)
            return
        with progress("exporting") as shown:
            level = onnx.export(
                sys.stdin.buffer if source == "-" else source,
                template,
                sys.stdout.buffer if target == "-" else target,
                verify=not no_verify,
                force=force,
                progress=shown,
                **options,
            )
    except TemplateMismatch as error:
        if len(error.rows) > 1:
            click.echo(error.table(), err=True)
        raise
    if target != "-":
        click.echo(f"{target}: level {level}, {show_size(os.path.getsize(target))}", err=True)


def _onnx() -> Any:
    """The converter, imported only when it is needed: onnx alone takes longer than `--help` may."""
    try:
        from elsa_converters import onnx
    except ImportError as error:
        raise ElsaError(
            f"exporting to ONNX needs {error.name}; pip install 'elsa-format[onnx]'"
        ) from None
    return onnx


def main() -> None:
    """Run as `elsa-export`."""
    export(prog_name="elsa-export")
