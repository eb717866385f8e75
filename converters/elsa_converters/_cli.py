"""elsa-export: a level, or all of them, as a model of another format."""

from typing import Any

import click

from elsa_converters._errors import TemplateMismatch
from elsa_format import MissingExtra
from elsa_format.cli import (
    FORCE,
    JSON,
    MAX_BYTES,
    OUTPUT,
    QUIET,
    SETTINGS,
    VERSION,
    level_options,
    one_level,
    progress,
    report,
    reports_errors,
    say,
    show_size,
    standard_input,
    standard_output,
    written_size,
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
@level_options
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
@OUTPUT
@MAX_BYTES
@click.option("--no-verify", is_flag=True, help="Do not compare checksums.")
@FORCE
@JSON
@QUIET
@VERSION
@reports_errors
def export(
    source: str,
    template: str,
    target: str,
    all_levels: bool,
    level_input: bool,
    no_verify: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Write one level of an ELSA file as an ONNX model, or a graph that runs any of them.

    \b
    elsa-export net.safetensors --onnx net.onnx --level 2 -o level2.onnx
    elsa-export net.safetensors --onnx net.onnx --sparsity 90 --sparse -o small.onnx
    elsa-export net.safetensors --onnx net.onnx --all-levels -o levels.onnx
    """
    one_level(options)
    if all_levels and any(options[name] is not None for name in ("level", "sparsity", "max_size")):
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
            level: Any = "all"
        else:
            with progress("exporting", quiet=quiet) as shown:
                level = onnx.export(
                    standard_input() if source == "-" else source,
                    template,
                    standard_output() if target == "-" else target,
                    verify=not no_verify,
                    force=force,
                    progress=shown,
                    **options,
                )
    except TemplateMismatch as error:
        if len(error.rows) > 1:
            say(error.table(), err=True)
        raise
    size = None if target == "-" else written_size(target)
    summary = f"{target}: {'all levels' if all_levels else f'level {level}'}"
    summary += "" if size is None else f", {show_size(size)}"
    summary += f" beside {source}" if all_levels else ""
    report(
        {"level": level, "size": size},
        summary if target != "-" else "",
        target,
        as_json=as_json,
        quiet=quiet,
    )


def _onnx() -> Any:
    """The converter, imported only when it is needed: onnx alone takes longer than `--help` may."""
    try:
        from elsa_converters import onnx
    except ImportError as error:
        raise MissingExtra.of(error, "exporting to ONNX", "onnx") from None
    return onnx
