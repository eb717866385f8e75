"""elsa-inspect: what a file holds, in the terminal, as JSON or as a page."""

import json
import math
from typing import Any

import click

from elsa_format import cli
from elsa_format._inspect import inspect, report_writer
from elsa_format._layouts import LAYOUT_NAMES

MOST_COLUMNS = 8
"""Levels that still fit a terminal."""


@click.command("inspect", context_settings=cli.SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path(allow_dash=True))
@cli.PRINTED
@click.option("--layers/--no-layers", default=True, help="Show the table of nested tensors.")
@click.option(
    "--html",
    "target",
    metavar="OUT",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write a page with tables and charts, which needs no network; - for stdout.",
)
@click.option(
    "--full",
    is_flag=True,
    help="With --html and --json: read the data too, for pictures of masks.",
)
@cli.MAX_BYTES
@cli.common_options
def command(
    source: str,
    printed: str,
    layers: bool,
    target: str | None,
    full: bool,
    max_bytes: int | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Show the levels and layers of an ELSA file; reads the header only, whatever the file's size.

    A download with ~ estimates the bytes of a level in a delivery file; elsa-ship tells them
    exactly. Of a level file, it shows which level it is, and how much each tensor keeps; of a
    delivery file or its first bytes, what is there, and how many bytes each level takes.

    \b
    elsa-inspect net.safetensors
    elsa-inspect net.safetensors --json | jq .levels
    elsa-inspect net.safetensors --html report.html
    elsa-inspect net.safetensors --html report.html --full
    """
    cli.keep_apart(source, target or printed)
    if target is not None:
        if as_json or printed != "-":
            raise click.UsageError("--html OUT goes with neither --json nor --output.")
        given = {"full": full, "force": force, "max_bytes": max_bytes}
        _write_page(_opened(source), target, given, quiet=quiet)
        return
    if full and not as_json:
        raise click.UsageError("--full goes with --html and --json.")
    if force and printed == "-":
        raise click.UsageError("--force goes with --html and --output.")
    width = cli.columns(printed)
    with cli.progress("reading", quiet=quiet or not full) as progress:
        found = inspect(_opened(source), full=full, max_bytes=max_bytes, progress=progress)
    if as_json:
        text = json.dumps(found, indent=2)
    else:
        text = (show if "levels" in found else show_level)(found, layers, width)
    cli.answer(text, printed, force=force)


def _opened(source: str) -> Any:
    return cli.standard_input() if source == "-" else source


def _write_page(source: Any, target: str, given: dict[str, Any], *, quiet: bool) -> None:
    write, out = report_writer(), cli.standard_output() if target == "-" else target
    with cli.progress("reading", quiet=quiet) as progress:
        size = write(source, out, progress=progress, **given)
    if target != "-" and not quiet:
        cli.say(f"{target}: report, {cli.show_size(size)}", err=True)


def show(found: dict[str, Any], layers: bool, width: int | None) -> str:
    """Everything `elsa-inspect` prints."""
    delivery, parameters = found.get("delivery"), found["parameters"]
    kinds = [tensor["kind"] for tensor in found["tensors"]]
    kind = ""
    if delivery is not None:
        there = delivery["available"]
        kind = f" delivery file, {f'level {there}' if there else 'no level'} downloaded"
    title = (
        f"{found['path']}: ELSA {found['version']}{kind}, {cli.show_size(found['file_size'])}, "
        f"{parameters:,} parameters ({cli.share(found['nested_weights'], parameters)} nested) in "
        f"{len(kinds)} tensors ({kinds.count('nested')} nested, "
        f"{kinds.count('per-level')} per level, {kinds.count('shared')} shared), "
        f"{found['bits']}-bit counters"
    )
    parts = [cli.wrap(title, width), cli.table(_level_rows(found), left=2, width=width)]
    if layers and "nested" in kinds:
        parts.append(cli.table(_layer_rows(found), left=3, width=width))
    return "\n\n".join(parts)


def show_level(level: dict[str, Any], layers: bool, width: int | None) -> str:
    """Everything `elsa-inspect` prints of a level file."""
    nested = [tensor for tensor in level["tensors"] if tensor["kind"] == "nested"]
    lines = [
        f"{level['path']}: level {level['level']} ({level['name']}) as {level['layout']}, "
        f"{cli.show_size(level['file_size'])} ({cli.show_size(level['dense_size'])} in memory), "
        f"{level['parameters']:,} parameters "
        f"({cli.share(level['nested_weights'], level['parameters'])} nested) in "
        f"{len(level['tensors'])} tensors ({len(nested)} nested)"
    ]
    if level["nonzero"] is not None:
        part = level["nonzero"] / (level["nested_weights"] or 1)
        lines.append(f"keeps {level['nonzero']:,} of {level['nested_weights']:,} ({part:.3%})")
    lines.append(level["digest"] or "no digest")
    text = cli.wrap("\n".join(lines), width)
    if not layers or not nested:
        return text
    rows = [["nested tensor", "dtype", "shape", "kept"]]
    for tensor in nested:
        share = _share(tensor["kept"], tensor)
        rows.append([tensor["name"], tensor["dtype"], _shape(tensor), share])
    return f"{text}\n\n{cli.table(rows, left=3, width=width)}"


def _level_rows(found: dict[str, Any]) -> list[list[str]]:
    levels, dense = found["levels"], found["dense"]
    metrics = sorted({key for level in levels for key in level["metrics"]})
    # On a narrow terminal the last columns are left out: what a level is worth comes before sizes.
    rows = [["level", "name", "sparsity", "kept", *metrics, *(f"as {x}" for x in LAYOUT_NAMES)]]
    for level in levels:
        sizes = [cli.show_size(level["sizes"][layout]) for layout in LAYOUT_NAMES]
        values = [_number(level["metrics"].get(key)) for key in metrics]
        kept = [f"{level['sparsity']:.3%}", f"{level['nonzero']:,}"]
        rows.append([str(level["level"]), level["name"], *kept, *values, *sizes])
    values = [_number(dense["metrics"].get(key)) for key in metrics]
    size = cli.show_size(dense["size"])
    # All of it belongs to the dense network; how much of that is zero, no header tells.
    rows.append(["dense", "", "-", f"{found['nested_weights']:,}", *values, size, "", ""])
    if delivery := found.get("delivery"):
        sizes = [cli.show_size(entry["size"]) for entry in delivery["levels"]]
    else:
        sizes = [cli.show_estimate(entry["download_estimate"]) for entry in (*levels, dense)]
    return [[*r[:2], size, *r[2:]] for r, size in zip(rows, ["download", *sizes], strict=True)]


def _layer_rows(found: dict[str, Any]) -> list[list[str]]:
    shown = min(len(found["levels"]), MOST_COLUMNS)
    more = ["…"] if shown < len(found["levels"]) else []
    levels = [f"level {t}" for t in range(1, shown + 1)]
    rows = [["kept in nested tensor", "dtype", "shape", *levels, *more]]
    nested = [tensor for tensor in found["tensors"] if tensor["kind"] == "nested"]
    for tensor in sorted(nested, key=lambda tensor: tensor["name"]):
        shares = [_share(count, tensor) for count in tensor["kept"][:shown]]
        rows.append([tensor["name"], tensor["dtype"], _shape(tensor), *shares, *more])
    return rows


def _shape(tensor: dict[str, Any]) -> str:
    return "×".join(map(str, tensor["shape"])) or "scalar"


def _share(kept: int | None, tensor: dict[str, Any]) -> str:
    elements = math.prod(tensor["shape"])
    return f"{kept / elements:.2%}" if kept is not None and elements else "-"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
