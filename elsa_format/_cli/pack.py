"""elsa-pack: nest levels into a checkpoint."""

from typing import Any

import click

from elsa_format import PackReport, cli, pack


@click.command("pack", context_settings=cli.SETTINGS)
@click.argument("dense", metavar="DENSE", type=click.Path())
@click.option(
    "--sparsities",
    metavar="LIST",
    help="One-shot magnitude levels, sparsest first: 95,90,80 (percent, or fractions below 1) or "
    "N:M patterns 1:8,1:4,2:4.",
)
@click.option(
    "--scope",
    type=click.Choice(["global", "uniform"]),
    help="Compare magnitudes over all nested tensors, or within each.  [default: global; of a "
    "directory: uniform]",
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
    type=click.IntRange(1, 255),
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
    type=click.Choice(["nearest", "overwrite"]),
    default="nearest",
    show_default=True,
    help="How a counter enters a weight; overwrite is the paper's.",
)
@click.option("--template", metavar="FILE", help="For ONNX: write the graph, pointing into OUT.")
@click.option("--no-digests", is_flag=True, help="Do not compute level digests.")
@cli.OUTPUT
@cli.shard_size_option
@cli.JOBS
@cli.FORCE
@cli.JSON
@cli.QUIET
@cli.VERSION
@cli.reports_errors
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

    DENSE is a .safetensors or .npz file, a shard index (.index.json), or what an installed
    converter reads (.onnx). An OUT that ends in .index.json is written in shards, those of DENSE or
    of at most --max-shard-size. Or DENSE is a model directory, as save_pretrained writes it, and so
    is OUT: config and tokenizer are copied.

    \b
    elsa-pack dense.safetensors --sparsities 95,90,80 -o net.safetensors
    elsa-pack bert --sparsities 90,80,50 -o bert-elsa
    elsa-pack dense.safetensors --sparsities 95,90,80 -o s3://bucket/net.safetensors
    elsa-pack dense.safetensors --sparsities 1:8,1:4,2:4 --exclude 'head*' -o net.safetensors
    elsa-pack dense.safetensors --level s95.safetensors --level s90.safetensors \\
        --per-level '*running*' -o net.safetensors
    elsa-pack dense.safetensors --counters N.npz --levels 3 -o net.safetensors
    """
    if sum(map(bool, (sparsities, levels, counters))) != 1:
        raise click.UsageError("Give one of --sparsities, --level and --counters.")
    if options["level_count"] is not None and not counters:
        raise click.UsageError("--levels goes with --counters.")
    if options["per_level"] and not levels:
        raise click.UsageError("--per-level takes tensors from --level checkpoints.")
    if template is not None and target == "-":
        raise click.UsageError("--template points into a file; -o - is none.")
    cli.check_shards(dense, target, options["max_shard_size"])
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
        "nested": {name: list(counts) for name, counts in packed.profile.nested.items()},
        "per_level": list(packed.profile.per_level),
        "shared": dict(packed.shared),
        "notes": list(packed.notes),
    }


def _summary(packed: PackReport) -> str:
    profile, total = packed.profile, packed.nested_weights
    rows = [["level", "name", "sparsity", "kept"]]
    for t, level in enumerate(profile.levels):
        kept = sum(counts[t] for counts in profile.nested.values())
        sparsity = 1 - kept / total if total else 0
        rows.append([str(t + 1), level.name, f"{sparsity:.3%}", f"{kept:,}"])
    lines = [cli.table(rows, left=2), ""]
    lines.append(f"nested: {len(packed.nested)} tensors, {total:,} weights: {_few(packed.nested)}")
    if profile.per_level:
        lines.append(f"per level: {len(profile.per_level)} tensors: {_few(profile.per_level)}")
    reasons: dict[str, list[str]] = {}
    for name, reason in packed.shared.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        lines.append(f"not nested ({reason}): {len(names)} tensors: {_few(names)}")
    lines += [f"note: {note}" for note in packed.notes]
    return "\n".join(lines)


def _few(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:4]) + (f", … {len(names) - 4} more" if len(names) > 4 else "")
