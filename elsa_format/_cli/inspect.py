"""elsa-inspect: what a file holds, in the terminal, as JSON or as a page."""

import json
from typing import Any

import click

from elsa_format import File
from elsa_format import open as open_elsa
from elsa_format._cli._options import FORCE, JSON, PRINTED, QUIET, SETTINGS, VERSION
from elsa_format._cli._progress import progress
from elsa_format._cli._terminal import (
    answer,
    keep_apart,
    reports_errors,
    say,
    show_size,
    standard_input,
    standard_output,
    table,
)
from elsa_format._layouts import LAYOUTS
from elsa_format._report import write_report

MOST_COLUMNS = 8
"""Levels that still fit a terminal."""


@click.command("inspect", context_settings=SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path(dir_okay=False, allow_dash=True))
@PRINTED
@click.option("--layers/--no-layers", default=True, help="Show the table of nested tensors.")
@click.option(
    "--html",
    "target",
    metavar="OUT",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write a page with tables and charts, which needs no network; - for stdout.",
)
@click.option("--full", is_flag=True, help="With --html: read the data too, for pictures of masks.")
@FORCE
@JSON
@QUIET
@VERSION
@reports_errors
def command(
    source: str,
    printed: str,
    layers: bool,
    target: str | None,
    full: bool,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show the levels and layers of an ELSA file; reads the header only, whatever the file's size.

    \b
    elsa-inspect net.safetensors
    elsa-inspect net.safetensors --json | jq .levels
    elsa-inspect net.safetensors --html report.html
    elsa-inspect net.safetensors --html report.html --full
    """
    keep_apart(source, target or printed)
    if target is not None:
        if as_json or printed != "-":
            raise click.UsageError("--html OUT goes with neither --json nor --output.")
        _write_page(source, target, full=full, force=force, quiet=quiet)
        return
    if full:
        raise click.UsageError("--full goes with --html.")
    if force and printed == "-":
        raise click.UsageError("--force goes with --html and --output.")
    with open_elsa(standard_input() if source == "-" else source) as file:
        text = json.dumps(describe(file), indent=2) if as_json else show(file, layers=layers)
    answer(text, printed, force=force)


def _write_page(source: str, target: str, *, full: bool, force: bool, quiet: bool) -> None:
    with progress("reading", quiet=quiet) as shown:
        size = write_report(
            standard_input() if source == "-" else source,
            standard_output() if target == "-" else target,
            full=full,
            force=force,
            progress=shown,
        )
    if target != "-" and not quiet:
        say(f"{target}: report, {show_size(size)}", err=True)


def describe(file: File) -> dict[str, Any]:
    """Everything `elsa-inspect --json` prints."""
    profile = file.profile
    return {
        "path": file.path,
        "version": profile.version,
        "bits": profile.bits,
        "file_size": file.file_size,
        "data_size": file.data_size,
        "parameters": sum(info.elements for info in file.tensors.values()),
        "nested_weights": file.nested_weights,
        "levels": [
            {
                "level": t,
                "name": level.name,
                "target": level.target,
                "pattern": level.pattern,
                "sparsity": file.sparsity(t),
                "nonzero": level.nonzero,
                "digest": level.digest,
                "metrics": dict(level.metrics),
                "sizes": {layout: file.size(t, layout) for layout in LAYOUTS},
            }
            for t, level in enumerate(file.levels, 1)
        ],
        "dense": {"metrics": dict(profile.dense_metrics), "size": file.size("dense")},
        "shard": profile.shard,
        "metadata": dict(file.metadata),
        "tensors": [
            {
                "name": name,
                "dtype": info.dtype.name,
                "shape": list(info.shape),
                "kind": _kind(file, name),
                "kept": list(profile.nested.get(name, ())) or None,
            }
            for name, info in file.tensors.items()
        ],
    }


def show(file: File, *, layers: bool) -> str:
    """Everything `elsa-inspect` prints."""
    parameters = sum(info.elements for info in file.tensors.values())
    kinds = [_kind(file, name) for name in file.tensors]
    title = (
        f"{file.path}: ELSA {file.profile.version}, {show_size(file.file_size)}, "
        f"{parameters:,} parameters in {len(file.tensors)} tensors "
        f"({kinds.count('nested')} nested, {kinds.count('per-level')} per level, "
        f"{kinds.count('shared')} shared), {file.bits}-bit counters"
    )
    parts = [title, _level_table(file)]
    if layers and file.nested:
        parts.append(_layer_table(file))
    return "\n\n".join(parts)


def _kind(file: File, name: str) -> str:
    if name in file.profile.nested:
        return "nested"
    return "per-level" if name in file.profile.varying else "shared"


def _level_table(file: File) -> str:
    metrics = sorted({key for level in file.levels for key in level.metrics})
    rows = [["level", "name", "sparsity", "kept", *(f"as {x}" for x in LAYOUTS), *metrics]]
    for t, level in enumerate(file.levels, 1):
        sizes = [show_size(file.size(t, layout)) for layout in LAYOUTS]
        values = [_number(level.metrics.get(key)) for key in metrics]
        kept = [f"{file.sparsity(t):.3%}", f"{level.nonzero:,}"]
        rows.append([str(t), level.name, *kept, *sizes, *values])
    dense = [_number(file.profile.dense_metrics.get(key)) for key in metrics]
    size = show_size(file.size("dense"))
    rows.append(["dense", "", f"{0:.3%}", f"{file.nested_weights:,}", size, "", "", *dense])
    return table(rows, left=2)


def _layer_table(file: File) -> str:
    shown = min(len(file.levels), MOST_COLUMNS)
    more = ["…"] if shown < len(file.levels) else []
    levels = [f"level {t}" for t in range(1, shown + 1)]
    rows = [["kept in nested tensor", "dtype", "shape", *levels, *more]]
    tensors = file.tensors
    for name, counts in sorted(file.nested.items()):
        info = tensors[name]
        kept = [f"{n / info.elements:.2%}" if info.elements else "-" for n in counts[:shown]]
        shape = "×".join(map(str, info.shape)) or "scalar"
        rows.append([name, info.dtype.name, shape, *kept, *more])
    return table(rows, left=3)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
