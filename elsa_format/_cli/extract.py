"""elsa-extract: stream one level out of a file."""

from typing import Any

import click

from elsa_format import extract
from elsa_format._cli._terminal import (
    JOBS,
    SETTINGS,
    LevelType,
    SizeType,
    SparsityType,
    check_shards,
    progress,
    reports_errors,
    say,
    show_size,
    standard_input,
    standard_output,
)
from elsa_format._layouts import LAYOUTS
from elsa_format._shard_output import written_size


@click.command("extract", context_settings=SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("-l", "--level", type=LevelType(), help="The level: 1 (sparsest) to T, or dense.")
@click.option(
    "--sparsity", type=SparsityType(), help="The densest level with at least this many zeros."
)
@click.option("--max-size", type=SizeType(), help="The densest level whose file is not larger.")
@click.option(
    "-o", "--output", "target", metavar="OUT", required=True, help="File, or - for stdout."
)
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default="dense",
    show_default=True,
    help="How to store nested tensors.",
)
@click.option("--keep-levels", is_flag=True, help="Stay an ELSA file with levels 1 to LEVEL.")
@click.option(
    "--max-shard-size", type=SizeType(), help="With an OUT.index.json: most bytes of a shard."
)
@click.option("-j", "--jobs", type=click.IntRange(1), default=1, help=JOBS)
@click.option("--no-verify", is_flag=True, help="Do not compare checksums.")
@click.option("-f", "--force", is_flag=True, help="Replace OUT if it exists.")
@reports_errors
def command(source: str, target: str, no_verify: bool, **options: Any) -> None:
    """Write one level of an ELSA file as a checkpoint of its own.

    SRC is read front to back once, in constant memory, so it may be a pipe (-) or a URL; or it is a
    shard index (.index.json). An OUT that ends in .index.json is written in shards, too.

    \b
    elsa-extract net.safetensors --level 2 -o level2.safetensors
    elsa-extract net.safetensors --sparsity 90 --layout bitmask -o small.safetensors
    elsa-extract net.safetensors --max-size 20MB --layout csr -o small.safetensors
    cat net.safetensors | elsa-extract - --level 1 -o - > level1.safetensors
    """
    wishes = [options[name] is not None for name in ("level", "sparsity", "max_size")]
    if sum(wishes) != 1:
        raise click.UsageError("Give one of --level, --sparsity and --max-size.")
    check_shards(target, options["max_shard_size"])
    if options["keep_levels"] and (options["layout"] != "dense" or options["max_size"] is not None):
        raise click.UsageError("--keep-levels goes with --layout dense, and not with --max-size.")
    with progress("extracting") as shown:
        level = extract(
            standard_input() if source == "-" else source,
            standard_output() if target == "-" else target,
            verify=not no_verify,
            progress=shown,
            **options,
        )
    if target != "-":
        size = show_size(written_size(target))
        form = (
            f"levels 1 to {level}, {size}"
            if options["keep_levels"]
            else f"level {level}, {size} as {options['layout']}"
        )
        say(f"{target}: {form}", err=True)


def main() -> None:
    """Run as `elsa-extract`."""
    command(prog_name="elsa-extract")
