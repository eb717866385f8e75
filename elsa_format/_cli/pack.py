"""elsa-pack: nest levels into a checkpoint."""

from collections.abc import Collection
from typing import Any

import click

from elsa_format import PackReport, cli, pack
from elsa_format._counters import MAX_LEVELS, ROUNDINGS
from elsa_format._packing.calibration import FAVOURS, KEEP_DENSE
from elsa_format._packing.options import SCOPES


@click.command("pack", context_settings=cli.SETTINGS)
@click.argument("dense", metavar="DENSE", type=click.Path())
@click.option(
    "--sparsities",
    metavar="LIST",
    help="Levels by magnitude, or by --calibrate, sparsest first: 95,90,80 (percent, or fractions "
    "below 1) or N:M patterns 1:8,1:4,2:4.",
)
@click.option(
    "--calibrate",
    metavar="SAMPLES",
    type=click.Path(),
    help="Choose and adapt the weights by samples of the inputs. For ONNX: .npz with an array for "
    "each input. For a directory: .txt, or .jsonl with a text field.",
)
@click.option(
    "--scope",
    type=click.Choice(SCOPES),
    help="Compare magnitudes over all nested tensors, or within each; auto, with --calibrate, "
    "measures what each needs.  [default: auto; without samples global; of a directory uniform]",
)
@click.option(
    "--axis",
    type=int,
    help="The axis N:M groups lie along.  [default: the last; of a directory: each layer's inputs]",
)
@click.option(
    "--level",
    "levels",
    metavar="FILE",
    multiple=True,
    type=click.Path(),
    help="A nested sparse checkpoint; repeat, sparsest first.",
)
@click.option(
    "--counters",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="The paper's N: integers under the same names; t = frozen at step t, 0 = dense only.",
)
@click.option(
    "--levels",
    "level_count",
    metavar="N",
    type=click.IntRange(1, MAX_LEVELS),
    help="With --counters: how many levels there are; N+1 is then dense only, too.  "
    "[default: the largest counter]",
)
@click.option("--names", metavar="LIST", help="Names of the levels: small,medium,large.")
@click.option("--include", metavar="GLOB", multiple=True, help="Nest only tensors that match.")
@click.option("--exclude", metavar="GLOB", multiple=True, help="Do not nest tensors that match.")
@click.option(
    "--nest-all",
    is_flag=True,
    help="Of a directory: embeddings, positions, norms, routers and output heads, too.",
)
@click.option(
    "--per-level",
    metavar="GLOB",
    multiple=True,
    help="Store these tensors once per level, from the --level checkpoints.",
)
@click.option(
    "--rounding",
    type=click.Choice(ROUNDINGS),
    default="nearest",
    show_default=True,
    help="How a counter enters a weight; overwrite is the paper's.",
)
@click.option("--template", metavar="FILE", help="For ONNX: write the graph, pointing into OUT.")
@click.option("--samples", metavar="N", type=click.IntRange(1), help="Use at most so many samples.")
@click.option("--length", metavar="N", type=click.IntRange(1), help="Tokens of a sample of text.")
@click.option(
    "--keep-dense",
    type=click.Choice(KEEP_DENSE),
    help="Bound what calibration costs the dense network, or keep it exactly but for the counters. "
    " [default: bounded]",
)
@click.option(
    "--favour",
    type=click.Choice(FAVOURS),
    help="Let calibration serve the sparse levels or the dense network more than the other.",
)
@click.option(
    "--all-classes", is_flag=True, help="Weigh classes alike, however often samples show them."
)
@click.option(
    "--max-memory",
    type=cli.SizeType(),
    help="Keep at most this much of activations in memory, and the rest in temporary files.",
)
@click.option(
    "--threads",
    metavar="N",
    type=click.IntRange(1),
    help="Threads of calibration; they do not change the result.  [default: one for each core]",
)
@click.option("--no-digests", is_flag=True, help="Do not compute level digests.")
@cli.OUTPUT
@cli.shard_size_option
@cli.JOBS
@cli.common_options
def command(
    dense: str,
    target: str,
    sparsities: str | None,
    names: str | None,
    levels: tuple[str, ...],
    counters: str | None,
    template: str | None,
    no_digests: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Nest sparse levels into a checkpoint, without changing its size.

    DENSE is a .safetensors or .npz file, a PyTorch checkpoint (.pt, .pth, .bin), an ONNX model
    (.onnx), or a shard index (.index.json). An OUT that ends in .index.json is written in shards,
    those of DENSE or of at most --max-shard-size. Or DENSE is a model directory, as save_pretrained
    writes it, and so is OUT: config and tokenizer are copied.

    \b
    elsa-pack dense.safetensors --sparsities 95,90,80 -o net.safetensors
    elsa-pack net.pt --sparsities 95,90,80 -o net.safetensors
    elsa-pack bert --sparsities 90,80,50 -o bert-elsa
    elsa-pack dense.safetensors --sparsities 95,90,80 -o s3://bucket/net.safetensors
    elsa-pack dense.safetensors --sparsities 1:8,1:4,2:4 --exclude 'head*' -o net.safetensors
    elsa-pack dense.safetensors --level s95.safetensors --level s90.safetensors \\
        --per-level '*running*' -o net.safetensors
    elsa-pack dense.safetensors --counters N.npz --levels 3 -o net.safetensors
    """
    with cli.progress("packing", quiet=quiet) as shown:
        packed = pack(
            dense,
            cli.standard_output() if target == "-" else target,
            sparsities=sparsities,
            levels=levels or None,
            counters=counters,
            names=names.split(",") if names else None,
            digests=not no_digests,
            template=template,
            progress=shown,
            **options,
        )
    size = None if target == "-" else cli.written_size(target)
    summary = _summary(packed) + (
        "" if size is None else f"\n{cli.shown(target)}: {cli.show_size(size)}"
    )
    cli.report(_as_json(packed, size), summary, target, as_json=as_json, quiet=quiet)


def _as_json(packed: PackReport, size: int | None) -> dict[str, Any]:
    return {
        "size": size,
        "bits": packed.profile.bits,
        "levels": [level.to_json() for level in packed.profile.levels],
        "dense": {"metrics": dict(packed.profile.dense_metrics)},
        "metrics": {name: info.to_json() for name, info in packed.profile.metrics.items()},
        "nested": {name: list(counts) for name, counts in packed.profile.nested.items()},
        "per_level": list(packed.profile.per_level),
        "shared": dict(packed.shared),
        "notes": list(packed.notes),
        "defaults": list(packed.defaults),
        "parameters": packed.parameters,
        "nested_weights": packed.nested_weights,
        "download_estimates": [
            {"level": level, "size": size} for level, size in packed.downloads.items()
        ],
    }


def _summary(packed: PackReport) -> str:
    profile, total = packed.profile, packed.nested_weights
    width = cli.columns(err=True)
    lines = [
        f"nested: {_tensors(packed.nested, width)}",
        f"{cli.share(total, packed.parameters)} of all parameters are nested: {total:,} of "
        f"{packed.parameters:,}",
    ]
    if profile.per_level:
        lines.append(f"per level: {_tensors(profile.per_level, width)}")
    reasons: dict[str, list[str]] = {}
    for name, reason in packed.shared.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        lines.append(f"not nested ({reason}): {_tensors(names, width)}")
    lines += [f"default: {default}" for default in packed.defaults]
    lines += [f"warning: {note}" for note in packed.notes]
    return "\n".join([cli.table(_rows(packed), left=2, width=width), "", *lines])


def _rows(packed: PackReport) -> list[list[str]]:
    """The levels, and the dense network if it was measured like them."""
    profile, total = packed.profile, packed.nested_weights
    metrics = sorted(profile.metrics)
    rows = [["level", "name", "download", "sparsity", "kept", *metrics]]
    for t, level in enumerate(profile.levels, 1):
        sparsity = 1 - level.nonzero / total if total and level.nonzero is not None else 0
        download = cli.show_estimate(packed.downloads[t])
        values = [f"{level.metrics[name]:.3g}" for name in metrics]
        rows.append(
            [str(t), level.name, download, f"{sparsity:.3%}", f"{level.nonzero:,}", *values]
        )
    if metrics:
        values = [f"{profile.dense_metrics[name]:.3g}" for name in metrics]
        download = cli.show_estimate(packed.downloads["dense"])
        rows.append(["dense", "", download, "-", f"{total:,}", *values])
    return rows


def _tensors(names: Collection[str], width: int | None) -> str:
    """How many tensors, and the names of the first."""
    few = [name if width is None else cli.cut(name, width - 8) for name in list(names)[:4]]
    more = f", … {len(names) - 4} more" if len(names) > 4 else ""
    return f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'}: {', '.join(few)}{more}"
