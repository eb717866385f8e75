"""elsa-export: a level, or all of them, as a model of another format."""

import re
from collections.abc import Mapping
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
    SparsityType,
    columns,
    level_options,
    needs_extra,
    one_level,
    progress,
    report,
    reports_errors,
    say,
    show_size,
    standard_input,
    standard_output,
    table,
    written_size,
)


class LatencyType(click.ParamType):  # type: ignore[type-arg]
    """A time: 5ms, 0.2s, 300us."""

    name = "time"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(us|µs|ms|s)", value.strip())
        if found is None or float(found[1]) == 0:
            self.fail(f"{value!r} is not a time such as 5ms or 0.2s", param, ctx)
        return float(found[1]) * {"s": 1.0, "ms": 1e-3}.get(found[2], 1e-6)


class FastType(SparsityType):
    """A sparsity, or nothing: then it is measured."""

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value if isinstance(value, bool) else super().convert(value, param, ctx)


class AxisType(click.ParamType):  # type: ignore[type-arg]
    """The size of a named axis: batch=8."""

    name = "axis=size"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        name, _, size = value.rpartition("=")
        if not name or not size.isascii() or not size.isdigit() or not 0 < int(size) < 1 << 31:
            self.fail(f"{value!r} is not an axis and its size, such as batch=8", param, ctx)
        return name, int(size)


NEEDS_ONNX = needs_extra("onnx", "this command", ["onnx", "onnxruntime"])

MOST_ROWS = 10
"""Differences of a template that are shown; the error says how many more there are."""

THREADS = click.option(
    "--threads", type=click.IntRange(1), help="Threads of ONNX Runtime to measure with."
)
DIM = click.option(
    "--dim",
    "sizes",
    multiple=True,
    type=AxisType(),
    metavar="AXIS=SIZE",
    help="Size of an axis that the graph leaves open, to measure with.  [default: 1]",
)


class PrecisionType(click.ParamType):  # type: ignore[type-arg]
    """Bits: 32, 16, 8, or auto."""

    name = "bits"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        known = {"32": 32, "16": 16, "8": 8, "auto": "auto"}
        if str(value) not in known:
            self.fail(f"{value!r} is not one of {', '.join(known)}", param, ctx)
        return known[str(value)]


PRECISION = click.option(
    "--precision",
    type=PrecisionType(),
    default=32,
    metavar="BITS",
    help="With --fast: compute with floats of 32 bits, integers of 16 or 8, or, with auto, the "
    "faster of 32 and 16 here.  [default: 32]",
)


@NEEDS_ONNX
@click.command("export", context_settings=SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path(allow_dash=True))
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
@click.option("--web", is_flag=True, help="A directory for browsers: OUT, with all levels.")
@click.option("--level-input", is_flag=True, help="With --all-levels: every run chooses its level.")
@click.option("--sparse", is_flag=True, help="Sparse initializers where they are smaller.")
@click.option(
    "--fast",
    type=FastType(),
    is_flag=False,
    flag_value=True,
    default=False,
    metavar="[=SPARSITY]",
    help="Sparse operators for the layers that run faster with them here, or for those of at "
    "least this sparsity.",
)
@PRECISION
@click.option(
    "--max-latency",
    type=LatencyType(),
    help="The densest level whose run takes no longer here, such as 5ms.",
)
@THREADS
@DIM
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
    web: bool,
    level_input: bool,
    max_latency: float | None,
    sizes: tuple[tuple[str, int], ...],
    no_verify: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Write one level of an ELSA file as an ONNX model, or a graph that runs any of them.

    With --web, write a directory that transformers.js and elsa-format/run load from any web server.

    SRC may be a model directory, a shard index, a delivery file or its beginning as well.

    \b
    elsa-export net.safetensors --onnx net.onnx --level 2 -o level2.onnx
    elsa-export net.safetensors --onnx net.onnx --sparsity 90 --sparse -o small.onnx
    elsa-export net.safetensors --onnx net.onnx --min accuracy=0.9 -o small.onnx
    elsa-export net.safetensors --onnx net.onnx --level 1 --fast -o fast.onnx
    elsa-export net.safetensors --onnx net.onnx --level 1 --fast --precision 16 -o fast.onnx
    elsa-export net.safetensors --onnx net.onnx --max-latency 5ms --fast -o fast.onnx
    elsa-export net.safetensors --onnx net.onnx --all-levels -o levels.onnx
    elsa-export net.safetensors --onnx net.onnx --web -o www/net
    """
    chosen = one_level(options)
    wishes = [name for name in ("level", "sparsity", "max_size") if options[name] is not None]
    others_given = bool(wishes) + (max_latency is not None)
    if others_given > 1 or ((all_levels or web) and (chosen or others_given or all_levels == web)):
        raise click.UsageError(
            "Give one of --level, --sparsity, --max-size, --max-latency, --all-levels and --web."
        )
    fast = options["fast"]
    others = [name for name in ("sparse", "fold", "external_data") if options[name]]
    others += ["fast"] if fast is not False else []
    if all_levels and (others or no_verify or "-" in (source, target)):
        raise click.UsageError("--all-levels points into the file SRC, and takes no such option.")
    if web and (others or no_verify or "-" in (source, target)):
        raise click.UsageError("--web writes every level of SRC, and takes no such option.")
    if level_input and not all_levels:
        raise click.UsageError("--level-input belongs to --all-levels.")
    if fast is not False and options["max_size"] is not None:
        raise click.UsageError("--fast has sizes of its own: give --level or --sparsity.")
    if (options["threads"] or sizes) and fast is not True and max_latency is None:
        raise click.UsageError("--threads and --dim are for what is measured, by --fast, say.")
    if options["precision"] != 32 and fast is False:
        raise click.UsageError("--precision goes with --fast.")
    if options["precision"] == "auto" and fast is not True:
        raise click.UsageError("--precision auto times the layers: give --fast without a sparsity.")
    if max_latency is not None and source == "-":
        raise click.UsageError("--max-latency reads SRC several times: it cannot be a pipe.")
    onnx = find_onnx()
    options["sizes"] = dict(sizes)
    layers: list[int] = []
    timed = fast is True or max_latency is not None
    axes = onnx.measured_axes(template, options["sizes"]) if timed else {}
    try:
        if max_latency is not None:
            names = ("fast", "precision", "threads", "sizes", "max_bytes")
            measured = {name: options[name] for name in names}
            measured |= {name: options.pop(name) for name in ("min", "max")}
            options["level"] = onnx.level_within(source, template, max_latency, **measured)
        if all_levels:
            given = {"level_input": level_input, "max_bytes": options["max_bytes"]}
            onnx.export_all_levels(source, template, target, force=force, **given)
            level: Any = "all"
        elif web:
            with progress("exporting", quiet=quiet) as shown:
                given = {"max_bytes": options["max_bytes"], "progress": shown}
                onnx.export_web(source, template, target, force=force, **given)
            level = "all"
        else:
            with progress("exporting", quiet=quiet) as shown:
                level = onnx.export(
                    standard_input() if source == "-" else source,
                    template,
                    standard_output() if target == "-" else target,
                    verify=not no_verify,
                    force=force,
                    progress=shown,
                    chosen=lambda *counts: layers.extend(counts),
                    **options,
                )
    except TemplateMismatch as error:
        if len(error.rows) > 1:
            rows = [["tensor", "template", "ELSA file"], *error.rows[:MOST_ROWS]]
            say(table(rows, left=3, width=columns(err=True)), err=True)
        raise
    size = None if target == "-" else written_size(target)
    summary = f"{target}: {'all levels' if all_levels or web else f'level {level}'}"
    summary += ", {} of {} layers sparse".format(*layers) if layers else ""
    summary += "" if size is None else f", {show_size(size)}"
    summary += f" beside {source}" if all_levels else ""
    summary += f"\n{show_axes(axes)}" if axes else ""
    report(
        {"level": level, "size": size} | ({"sparse_layers": layers[0]} if layers else {}),
        summary if target != "-" else "",
        target,
        as_json=as_json,
        quiet=quiet,
    )


def show_axes(axes: Mapping[str, int]) -> str:
    """The sizes that open axes were measured with, and how to set them."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    return f"open axes measured as {sizes}; set them with --dim AXIS=SIZE"


def find_onnx() -> Any:
    """The converter, imported only when it is needed: onnx alone takes longer than `--help` may."""
    try:
        from elsa_converters import onnx
    except ImportError as error:
        raise MissingExtra.of(error, "exporting to ONNX", "onnx") from None
    return onnx
