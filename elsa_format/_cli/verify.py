"""elsa-verify: check everything the specification requires."""

import dataclasses
import json

import click

from elsa_format import verify
from elsa_format._cli._terminal import (
    JOBS,
    SETTINGS,
    progress,
    reports_errors,
    say,
    standard_input,
)


@click.command("verify", context_settings=SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("-j", "--jobs", type=click.IntRange(1), default=1, help=JOBS)
@reports_errors
def command(source: str, as_json: bool, jobs: int) -> None:
    """Check an ELSA file: header, profile, every checksum, counter, count and level digest.

    SRC may be - for standard input, a URL, or a shard index (.index.json). Exit code 0 means that
    all of it holds, 3 that something does not; the message says what.

    \b
    elsa-verify net.safetensors
    """
    with progress("verifying") as shown:
        report = verify(standard_input() if source == "-" else source, jobs=jobs, progress=shown)
    if as_json:
        say(json.dumps({"valid": True, **dataclasses.asdict(report)}))
    else:
        say(
            f"{report.path}: valid: {report.levels} levels, {report.tensors} tensors "
            f"({report.nested} nested), {report.checksums} checksums and {report.digests} level "
            "digests compared"
        )


def main() -> None:
    """Run as `elsa-verify`."""
    command(prog_name="elsa-verify")
