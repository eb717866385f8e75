"""elsa-inspect: what a file holds, in the terminal, as JSON or as a page."""

import json
import math
from collections.abc import Callable
from typing import Any

import click

from elsa_format import File, cli
from elsa_format import open as open_elsa
from elsa_format._delivery.estimate import estimated_downloads
from elsa_format._layouts import LAYOUTS
from elsa_format._report.page import write_report

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
@click.option("--full", is_flag=True, help="With --html: read the data too, for pictures of masks.")
@cli.MAX_BYTES
@cli.FORCE
@cli.JSON
@cli.QUIET
@cli.VERSION
@cli.reports_errors
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
        wishes = {"full": full, "force": force, "max_bytes": max_bytes}
        _write_page(source, target, wishes, quiet=quiet)
        return
    if full:
        raise click.UsageError("--full goes with --html.")
    if force and printed == "-":
        raise click.UsageError("--force goes with --html and --output.")
    width = cli.columns(printed)
    with open_elsa(cli.standard_input() if source == "-" else source, max_bytes=max_bytes) as file:
        if file.profile.single:
            level = describe_level(file)
            text = json.dumps(level, indent=2) if as_json else show_level(level, layers, width)
        else:
            text = json.dumps(describe(file), indent=2) if as_json else show(file, layers, width)
    cli.answer(text, printed, force=force)


def _write_page(source: str, target: str, wishes: dict[str, Any], *, quiet: bool) -> None:
    with cli.progress("reading", quiet=quiet) as shown:
        size = write_report(
            cli.standard_input() if source == "-" else source,
            cli.standard_output() if target == "-" else target,
            progress=shown,
            **wishes,
        )
    if target != "-" and not quiet:
        cli.say(f"{target}: report, {cli.show_size(size)}", err=True)


def describe(file: File) -> dict[str, Any]:
    """Everything `elsa-inspect --json` prints."""
    profile, estimates = file.profile, _estimates(file)
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
                "download_estimate": estimates[t],
            }
            for t, level in enumerate(file.levels, 1)
        ],
        "dense": {
            "metrics": dict(profile.dense_metrics),
            "size": file.size("dense"),
            "download_estimate": estimates["dense"],
        },
        **_delivery(file),
        "shard": profile.shard,
        "metadata": dict(file.metadata),
        "tensors": _tensors(file, lambda counts: list(counts) or None),
    }


def show(file: File, layers: bool, width: int | None) -> str:
    """Everything `elsa-inspect` prints."""
    parameters = sum(info.elements for info in file.tensors.values())
    kinds = [_kind(file, name) for name in file.tensors]
    delivery = _delivery(file).get("delivery")
    kind = "" if delivery is None else f" delivery file, level {delivery['there']} downloaded"
    title = (
        f"{file.path}: ELSA {file.profile.version}{kind}, {cli.show_size(file.file_size)}, "
        f"{parameters:,} parameters ({cli.share(file.nested_weights, parameters)} nested) in "
        f"{len(file.tensors)} tensors ({kinds.count('nested')} nested, "
        f"{kinds.count('per-level')} per level, {kinds.count('shared')} shared), "
        f"{file.bits}-bit counters"
    )
    parts = [cli.wrap(title, width), cli.table(_level_rows(file), left=2, width=width)]
    if layers and file.nested:
        parts.append(cli.table(_layer_rows(file), left=3, width=width))
    return "\n\n".join(parts)


def describe_level(file: File) -> dict[str, Any]:
    """Everything `elsa-inspect --json` prints of a level file."""
    entry = file.levels[0]
    return {
        "path": file.path,
        "level": entry.number,
        "name": entry.name,
        "layout": file.network.layout,
        "file_size": file.file_size,
        "dense_size": file.data_size,
        "parameters": sum(info.elements for info in file.tensors.values()),
        "nested_weights": file.nested_weights,
        "nonzero": entry.nonzero,
        "digest": entry.digest,
        "metadata": file.network.metadata,
        "tensors": _tensors(file, lambda counts: counts[0] if counts else None),
    }


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
        elements = math.prod(tensor["shape"])
        known = tensor["kept"] is not None and elements
        shape = "×".join(map(str, tensor["shape"])) or "scalar"
        share = f"{tensor['kept'] / elements:.2%}" if known else "-"
        rows.append([tensor["name"], tensor["dtype"], shape, share])
    return f"{text}\n\n{cli.table(rows, left=3, width=width)}"


def _delivery(file: File) -> dict[str, Any]:
    """What there is of a delivery file, and how many of its first bytes each level needs."""
    network = file.network
    if not network.downloads:
        return {}
    there = network.available[-1] if network.available else None
    sizes = [{"level": level, "size": size} for level, size in network.downloads.items()]
    return {"delivery": {"there": there, "levels": sizes}}


def _tensors(file: File, kept: Callable[[tuple[int, ...]], Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "dtype": info.dtype.name,
            "shape": list(info.shape),
            "kind": _kind(file, name),
            "kept": kept(file.profile.nested.get(name, ())),
        }
        for name, info in file.tensors.items()
    ]


def _kind(file: File, name: str) -> str:
    if name in file.profile.nested:
        return "nested"
    if file.profile.single:
        return "other"
    return "per-level" if name in file.profile.varying else "shared"


def _level_rows(file: File) -> list[list[str]]:
    metrics = sorted({key for level in file.levels for key in level.metrics})
    rows = [["level", "name", "sparsity", "kept", *(f"as {x}" for x in LAYOUTS), *metrics]]
    for t, level in enumerate(file.levels, 1):
        sizes = [cli.show_size(file.size(t, layout)) for layout in LAYOUTS]
        values = [_number(level.metrics.get(key)) for key in metrics]
        kept = [f"{file.sparsity(t):.3%}", f"{level.nonzero:,}"]
        rows.append([str(t), level.name, *kept, *sizes, *values])
    dense = [_number(file.profile.dense_metrics.get(key)) for key in metrics]
    size = cli.show_size(file.size("dense"))
    # All of it belongs to the dense network; how much of that is zero, no header tells.
    rows.append(["dense", "", "-", f"{file.nested_weights:,}", size, "", "", *dense])
    if delivery := _delivery(file).get("delivery"):
        sizes = [cli.show_size(entry["size"]) for entry in delivery["levels"]]
    else:
        sizes = [cli.show_estimate(size) for size in _estimates(file).values()]
    return [[*r[:2], size, *r[2:]] for r, size in zip(rows, ["download", *sizes], strict=True)]


def _estimates(file: File) -> dict[int | str, int]:
    return estimated_downloads(file.network.header.tensors, file.profile)


def _layer_rows(file: File) -> list[list[str]]:
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
    return rows


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
