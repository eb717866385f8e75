"""elsa-fetch: download a level of a delivery file by its own bytes, and later the rest."""

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
    help="Write to this file, which grows in place.",
)
@cli.LEVEL
@cli.SPARSITY
@click.option("--max-size", type=cli.SizeType(), help="The densest level that takes no more bytes.")
@cli.metric_options
@click.option("--upgrade", type=cli.LevelType(), help="As --level, for an OUT that exists.")
@cli.MAX_BYTES
@cli.common_options
def command(source: str, target: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Download a level, or upgrade a previous download.

    SRC is the URL or path of a delivery file (see elsa-ship). OUT is always a prefix of it: an
    interrupted download resumes at the last byte, and an upgrade downloads the difference. A shard
    index (.index.json) is downloaded with the files of all shards, beside OUT; a model directory
    with all its files, into the directory OUT. OUT is a local path: copy it to an object store with
    the store's own tool.

    \b
    elsa-fetch https://host/net.ship.safetensors --level 1 -o net.ship.safetensors
    elsa-fetch https://host/net.ship.safetensors --upgrade 2 -o net.ship.safetensors
    elsa-fetch https://host/net.ship.safetensors --max-size 20MB -o net.ship.safetensors
    elsa-fetch https://host/net.ship.safetensors --min accuracy=0.9 -o net.ship.safetensors
    elsa-fetch https://host/model/ --level 1 -o model
    """
    if cli.one_level(options) == (options["upgrade"] is not None):
        raise click.UsageError("Give one of --level, --sparsity, --max-size and --upgrade.")
    if target == "-":
        raise click.UsageError("-o - is standard output, but OUT grows in place: name a file.")
    if source == "-":
        raise click.UsageError("SRC - is standard input, which cannot be resumed: name a file.")
    with cli.progress("fetching", quiet=quiet) as shown:
        found = fetch(source, target, progress=shown, **options)
    summary = (
        f"{cli.shown(target)}: level {found.available}, {cli.show_size(found.size)}; "
        f"{cli.show_size(found.fetched)} downloaded now"
    )
    if found.available != found.level:
        summary += f"; level {found.level} was part of it already"
    result = {
        "level": found.level,
        "available": found.available,
        "size": found.size,
        "fetched": found.fetched,
    }
    cli.report(result, summary, target, as_json=as_json, quiet=quiet)
