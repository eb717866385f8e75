"""elsa-bench: what each level costs on this machine, and which are worth it."""

import json
from typing import Any

import click

from elsa_converters._cli import DIM, NEEDS_ONNX, THREADS, find_onnx, show_axes
from elsa_format.cli import (
    FORCE,
    JSON,
    PRINTED,
    QUIET,
    SETTINGS,
    VERSION,
    answer,
    columns,
    reports_errors,
    say,
    show_size,
    table,
    wrap,
)


@NEEDS_ONNX
@click.command("bench", context_settings=SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path())
@click.option(
    "--onnx",
    "template",
    metavar="TEMPLATE",
    required=True,
    type=click.Path(dir_okay=False),
    help="The graph: a template, or any ONNX model with the same weights.",
)
@THREADS
@DIM
@click.option("--metric", default="accuracy", help="The recorded metric.  [default: accuracy]")
@click.option(
    "--seconds", type=click.FloatRange(0), default=2.0, help="For each level.  [default: 2]"
)
@click.option(
    "--html",
    "target",
    metavar="OUT",
    type=click.Path(dir_okay=False),
    help="Write the page of elsa-inspect, with these measurements.",
)
@PRINTED
@FORCE
@JSON
@QUIET
@VERSION
@reports_errors
def bench(
    source: str,
    template: str,
    threads: int | None,
    sizes: tuple[tuple[str, int], ...],
    metric: str,
    seconds: float,
    target: str | None,
    printed: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure every level of an ELSA file in ONNX Runtime on this machine, dense and fast.

    SRC may be a model directory, a shard index, a delivery file or its beginning as well: then the
    levels that are there are measured.

    \b
    elsa-bench net.safetensors --onnx net.onnx --threads 1
    elsa-bench net.safetensors --onnx net.onnx --dim batch=8 --json
    elsa-bench net.safetensors --onnx net.onnx --html report.html
    """
    if force and printed == "-" and target is None:
        raise click.UsageError("--force goes with --html and --output.")
    onnx = find_onnx()
    rows = onnx.measure_levels(
        source,
        template,
        metric=metric,
        threads=threads,
        sizes=dict(sizes),
        seconds=seconds,
        progress=(lambda what: None)
        if quiet
        else (lambda what: say(f"measuring {what}", err=True)),
    )
    plain = [row.as_dict() for row in rows]
    if target is not None:
        from elsa_report import write_report  # takes long to import

        write_report(source, target, measured=plain, force=force)
    width = columns(printed)
    text = json.dumps(plain, indent=2) if as_json else show(rows, metric, width)
    answer(text, printed, force=force)


def show(rows: Any, metric: str, width: int | None = None) -> str:
    """The rows as a table; a level that no other beats has a star."""
    # On a narrow terminal the last columns are left out.
    lines = [["level", "", "sparsity", "dense", "fast", metric, "size", "download", "memory"]]
    for row in rows:
        lines.append(
            [
                str(row.level),
                "*" if row.best else "",
                "-" if row.sparsity is None else f"{row.sparsity:.2%}",
                f"{row.dense_seconds * 1e3:.4g} ms",
                "-" if row.fast_seconds is None else f"{row.fast_seconds * 1e3:.4g} ms",
                "" if row.quality is None else f"{row.quality:.6g}",
                show_size(row.size),
                "-" if row.download is None else show_size(row.download),
                "-" if row.memory is None else show_size(row.memory),
            ]
        )
    notes = [f"* No other level is at least as good in {metric} and time, and better in one."]
    if not any(row.best for row in rows):
        notes = [f"No level records {metric}; --metric names another metric."]
    if rows[0].axes:
        notes.append(show_axes(rows[0].axes))
    if any(row.fast_seconds is None for row in rows):
        notes.append("The sparse operators were not built, for want of a C compiler.")
    text = wrap("\n".join(notes), width)
    return f"{table(lines, left=2, width=width)}\n\n{text}"
