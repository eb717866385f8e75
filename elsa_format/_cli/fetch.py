"""elsa-fetch: bring a level of a delivery file by its own bytes, and later the rest."""

from typing import Any

import click

from elsa_format import cli, fetch


@click.command("fetch", context_settings=cli.SETTINGS)
@click.argument("source", metavar="SRC")
@click.option(
    "-o",
    "--output",
    "target",
    metavar="OUT",
    required=True,
    help="Grows in place; a file, or URL of a store.",
)
@click.option(
    "-l", "--level", type=cli.LevelType(), help="The level: 1 (sparsest) to T, its name, or dense."
)
@click.option(
    "--sparsity", type=cli.SparsityType(), help="The densest level with at least this many zeros."
)
@click.option("--max-size", type=cli.SizeType(), help="The densest level that takes no more bytes.")
@click.option("--upgrade", type=cli.LevelType(), help="As --level, for an OUT that is there.")
@cli.FORCE
@cli.JSON
@cli.QUIET
@cli.VERSION
@cli.reports_errors
def command(source: str, target: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Bring the bytes of a level that are not there yet.

    SRC is the URL or path of a delivery file (see elsa-ship). OUT is its beginning at every moment:
    what was cut goes on where it ended, and an upgrade brings the difference. Of a shard index
    (.index.json) the files of all shards are brought, beside OUT. Of a model directory, whose URL
    ends in a slash, all files are brought into the directory OUT. In a store (s3://…), OUT is
    replaced when all is there.

    \b
    elsa-fetch https://host/net.ship.safetensors --level 1 -o net.ship.safetensors
    elsa-fetch https://host/net.ship.safetensors --upgrade 2 -o net.ship.safetensors
    elsa-fetch https://host/net.ship.safetensors --max-size 20MB -o net.ship.safetensors
    elsa-fetch https://host/model/ --level 1 -o model
    elsa-fetch https://host/net.ship.safetensors --level 1 -o s3://bucket/net.ship.safetensors
    """
    names = ("level", "sparsity", "max_size", "upgrade")
    if sum(options[name] is not None for name in names) != 1:
        raise click.UsageError("Give one of --level, --sparsity, --max-size and --upgrade.")
    with cli.progress("fetching", quiet=quiet) as shown:
        found = fetch(source, target, progress=shown, **options)
    summary = (
        f"{cli.shown(target)}: level {found.level}, {cli.show_size(found.size)}, "
        f"of which {cli.show_size(found.fetched)} were fetched now"
    )
    result = {"level": found.level, "size": found.size, "fetched": found.fetched}
    cli.report(result, summary, target, as_json=as_json, quiet=quiet)
