"""elsa-record: what levels are worth, recorded in their file."""

from typing import Any

import click

from elsa_format import Metric, cli, record


@click.command("record", context_settings=cli.SETTINGS)
@click.argument("source", metavar="NET")
@click.argument(
    "metrics", metavar="METRIC=VALUE...", type=cli.MetricType(), nargs=-1, required=True
)
@click.option(
    "-l",
    "--level",
    type=cli.LevelType(),
    required=True,
    help="The level: 1 (sparsest) to T, its name, or dense.",
)
@click.option(
    "--better",
    type=click.Choice(["higher", "lower"]),
    help="Which values are better.  [default: as recorded, or as for well-known metrics]",
)
@click.option("--samples", type=click.IntRange(0), help="Samples that were measured.")
@click.option("--recorded", metavar="TEXT", help="The program that measured them.")
@click.option(
    "-o", "--output", "target", metavar="OUT", help="Write to this file.  [default: replace NET]"
)
@cli.MAX_BYTES
@cli.common_options
def command(
    source: str,
    metrics: tuple[tuple[str, float], ...],
    level: Any,
    better: str | None,
    samples: int | None,
    target: str | None,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Record metrics of a level, or of the dense network, in an ELSA file.

    NET is a file, a shard index (.index.json) or a model directory. Its weights stay as they are. A
    new file replaces it when it is complete; of an index, new shards under new names do. The
    weights begin elsewhere afterwards: ONNX templates and --all-levels graphs that point into NET
    have to be written again.

    \b
    elsa-record net.safetensors --level 2 accuracy=0.93
    elsa-record net.safetensors --level dense loss=1.21 --better lower -o known.safetensors
    elsa-extract net.safetensors --min accuracy=0.9 -o small.safetensors
    """
    if source == "-" or target == "-":
        raise click.UsageError("NET and OUT are files: the new header needs the whole profile.")
    if len(dict(metrics)) < len(metrics):
        raise click.UsageError("The same metric is given twice.")
    found = {name: Metric(value, better or "", samples) for name, value in metrics}
    with cli.progress("recording", quiet=quiet) as shown:
        moved = record(source, target, {level: found}, progress=shown, **options)
    place = target or source
    values = ", ".join(f"{name} {value:.10g}" for name, value in metrics)
    level = level if level == "dense" else f"level {level}"
    summary = f"{cli.shown(place)}: {level}: {values}"
    if moved:
        summary += (
            "\nwarning: its weights begin elsewhere now; write ONNX models that point to them again"
        )
    cli.report(
        {"level": level, "metrics": dict(metrics), "moved": moved},
        summary,
        place,
        as_json=as_json,
        quiet=quiet,
    )
