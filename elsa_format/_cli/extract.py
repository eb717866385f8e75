"""elsa-extract: stream one level out of a file."""

from typing import Any

import click

from elsa_format import cli, extract
from elsa_format._layouts import LAYOUT_NAMES


@click.command("extract", context_settings=cli.SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path(allow_dash=True))
@cli.level_options
@cli.OUTPUT
@click.option(
    "--layout",
    type=click.Choice(LAYOUT_NAMES),
    default="dense",
    show_default=True,
    help="How to store nested tensors.",
)
@click.option("--keep-levels", is_flag=True, help="Stay an ELSA file with levels 1 to LEVEL.")
@click.option(
    "--restore",
    "--whole",  # its name in earlier releases
    "restore",
    is_flag=True,
    help="Restore the ELSA file of which a delivery file was made.",
)
@cli.shard_size_option
@cli.JOBS
@cli.MAX_BYTES
@click.option("--no-verify", is_flag=True, help="Do not compare checksums.")
@cli.common_options
def command(
    source: str, target: str, no_verify: bool, as_json: bool, quiet: bool, **options: Any
) -> None:
    """Write one level of an ELSA file as a checkpoint of its own, or a level file in another form.

    SRC is read front to back once, in constant memory, so it may be a pipe (-) or a URL; or it is a
    shard index (.index.json). An OUT that ends in .index.json is written in shards, too. Of a model
    directory, OUT is one that from_pretrained loads; a layout is told by its weights' name.

    \b
    elsa-extract net.safetensors --level 2 -o level2.safetensors
    elsa-extract net.safetensors --level 95% -o small.safetensors
    elsa-extract bert-elsa --level 2 -o bert-80
    elsa-extract net.safetensors --sparsity 90 --layout bitmask -o small.safetensors
    elsa-extract net.safetensors --max-size 20MB --layout csr -o small.safetensors
    elsa-extract net.safetensors --min accuracy=0.9 -o small.safetensors
    cat net.safetensors | elsa-extract - --level 1 -o - > level1.safetensors
    elsa-extract s3://bucket/net.safetensors --level 1 -o s3://bucket/level1.safetensors
    elsa-extract small.safetensors --layout dense -o level3.safetensors
    elsa-extract net.ship.safetensors --restore -o net.safetensors
    """
    wishes = cli.one_level(options) or options["max_shard_size"] is not None
    if options["restore"] and (wishes or options["keep_levels"] or options["layout"] != "dense"):
        raise click.UsageError(
            "--restore gives the network as it was; it takes no level, layout or shard size."
        )
    cli.check_shards(source, target, options["max_shard_size"])
    if options["keep_levels"] and (options["layout"] != "dense" or options["max_size"] is not None):
        raise click.UsageError("--keep-levels goes with --layout dense, and not with --max-size.")
    with cli.progress("extracting", quiet=quiet) as shown:
        level = extract(
            cli.standard_input() if source == "-" else source,
            cli.standard_output() if target == "-" else target,
            verify=not no_verify,
            progress=shown,
            **options,
        )
    size = None if target == "-" else cli.written_size(target)
    kept = options["keep_levels"]
    name = cli.shown(target)
    summary = f"{name}: levels 1 to {level}" if kept else f"{name}: level {level}"
    if options["restore"]:
        kept, summary = True, f"{name}: restored"
    summary += "" if size is None else f", {cli.show_size(size)}"
    summary += "" if kept else f" as {options['layout']}"
    cli.report(
        {"level": level, "layout": options["layout"], "size": size},
        summary if target != "-" else "",
        target,
        as_json=as_json,
        quiet=quiet,
    )
