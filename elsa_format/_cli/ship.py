"""elsa-ship: make a delivery file, whose first bytes are the sparsest level."""

import click

from elsa_format import cli, ship
from elsa_format._delivery import BLOCK, BLOCKS
from elsa_format._ship import ShipReport


@click.command("ship", context_settings=cli.SETTINGS)
@click.argument("source", metavar="NET", type=click.Path(allow_dash=True))
@cli.OUTPUT
@click.option("--split", is_flag=True, help="Each part as a file OUT.part-NNN of its own.")
@click.option(
    "--block",
    type=click.IntRange(BLOCKS.start, BLOCKS.stop - 1),
    default=BLOCK,
    show_default=True,
    help="log2 of the weights that are coded together.",
)
@click.option("-j", "--jobs", type=click.IntRange(1), default=1, help="Threads.  [default: 1]")
@cli.MAX_BYTES
@cli.common_options
def command(
    source: str,
    target: str,
    split: bool,
    block: int,
    jobs: int,
    max_bytes: int | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Make a delivery file of an ELSA file: level by level, each by its own bytes.

    The first bytes of OUT are level 1, the next turn it into level 2, and all of it gives NET back,
    byte for byte. NET is verified on the way. Of a shard index (.index.json) each shard becomes a
    delivery file, and OUT is their index. Of a model directory, OUT is a directory, with a list of
    its files for elsa-fetch.

    \b
    elsa-ship net.safetensors -o net.ship.safetensors
    elsa-ship model -o www/model
    elsa-ship net.safetensors --split -o net.ship.safetensors  # for hosts without range requests
    """
    with cli.progress("shipping", quiet=quiet) as shown:
        made = ship(
            cli.standard_input() if source == "-" else source,
            cli.standard_output() if target == "-" else target,
            block=block,
            split=split,
            jobs=jobs,
            max_bytes=max_bytes,
            force=force,
            progress=shown,
        )
    result = {
        "levels": [{"level": level, "size": size} for level, size in made.sizes.items()],
        "source": made.source,
        "files": made.files,
    }
    summary = f"{cli.shown(target)}: the first bytes are\n{_table(made)}" if target != "-" else ""
    cli.report(result, summary, target, as_json=as_json, quiet=quiet)


def _table(made: ShipReport) -> str:
    rows = [["level", "bytes", "of the ELSA file"]]
    for level, size in made.sizes.items():
        rows.append([str(level), cli.show_size(size), f"{size / made.source:.1%}"])
    return cli.table(rows, width=cli.columns(err=True))
