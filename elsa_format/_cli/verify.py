"""elsa-verify: check everything the specification requires."""

import dataclasses
import json

import click

from elsa_format import cli, verify
from elsa_format._verify import DeliveryReport


@click.command("verify", context_settings=cli.SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path(allow_dash=True))
@click.option(
    "--source",
    "original",
    metavar="NET",
    help="The ELSA file of which SRC, a delivery file, was made; fails if NET has changed since.",
)
@cli.PRINTED
@cli.JOBS
@cli.MAX_BYTES
@cli.common_options
def command(
    source: str,
    original: str | None,
    printed: str,
    jobs: int,
    max_bytes: int | None,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Check an ELSA file: header, profile, every checksum, counter, count and level digest.

    Of a level file: its document, that its parts fit together, and its digest. Of a delivery file:
    all parts that were downloaded.

    SRC may be - for standard input, a URL, a shard index (.index.json) or a model directory. Exit
    code 0 means that all of it holds, 3 that something does not; the message says what.

    \b
    elsa-verify net.safetensors
    elsa-verify net.ship.safetensors --source net.safetensors
    """
    cli.keep_apart(source, printed)
    with cli.progress("verifying", quiet=quiet) as shown:
        found = verify(
            cli.standard_input() if source == "-" else source,
            original=original,
            jobs=jobs,
            max_bytes=max_bytes,
            progress=shown,
        )
    levels = f"{found.levels} levels"
    if isinstance(found, DeliveryReport):
        levels = f"{_downloaded(found)} downloaded"
    summary = (
        f"{found.path}: valid: {levels}, {found.tensors} tensors "
        f"({found.nested} nested), {found.checksums} checksums and {found.digests} level "
        "digests compared"
    )
    if as_json:
        told = {"valid": True, **dataclasses.asdict(found)}
        if "available" in told:
            told["there"] = told["available"]  # its name in earlier releases
        cli.answer(json.dumps(told), printed, force=force)
    elif printed != "-":
        cli.answer(summary, printed, force=force)
    elif not quiet:
        cli.say(cli.wrap(summary, cli.columns()))  # the exit code says it, too


def _downloaded(found: DeliveryReport) -> str:
    """How much of a delivery file there is."""
    if found.available == "dense":
        return f"all {found.levels} levels and the dense network"
    return f"{found.available or 0} of {found.levels} levels"
