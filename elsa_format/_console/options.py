"""Options that commands share, and what may be given for them."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from elsa_format import __version__
from elsa_format._container.index import is_url
from elsa_format._kernels import kernels

F = TypeVar("F", bound=Callable[..., Any])
SETTINGS = {"help_option_names": ["-h", "--help"]}

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class SizeType(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: 20MB, 1.5GiB, 4096."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"([0-9]*\.?[0-9]*)\s*([KMGT]?)(i?)B?", value.strip(), re.IGNORECASE)
        try:
            if found is None:
                raise ValueError
            unit = found[2].upper()
            scale = 1024 ** list(UNITS).index(unit) if found[3] else UNITS[unit]
            size = int(float(found[1]) * scale)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is not a size such as 20MB or 1.5GiB", param, ctx)
        if size < 1:
            self.fail(f"{value!r} is less than a byte", param, ctx)
        return size


VERSION = click.version_option(__version__, message=f"%(prog)s %(version)s (kernels: {kernels()})")
QUIET = click.option("-q", "--quiet", is_flag=True, help="No progress, no summary.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
FORCE = click.option("-f", "--force", is_flag=True, help="Replace what exists.")
JOBS = click.option(
    "-j",
    "--jobs",
    type=click.IntRange(1),
    default=1,
    help="Shards worked on at a time, each in its own few megabytes.  [default: 1]",
)
MAX_BYTES = click.option(
    "--max-bytes",
    type=SizeType(),
    help="Refuse a network whose header or tensors, as dense arrays, take more than this.",
)
OUTPUT = click.option(
    "-o", "--output", "target", metavar="OUT", required=True, help="File, or - for stdout."
)
PRINTED = click.option(
    "-o", "--output", "printed", metavar="OUT", default="-", help="Print to a file instead."
)


class LevelType(click.ParamType):  # type: ignore[type-arg]
    """A level: 1..T, dense, or its name; only the file knows which there are."""

    name = "level"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names of the levels in SRC, if that is a file."""
        from elsa_format import ElsaError
        from elsa_format import open as open_elsa

        # An option without its value keeps click from giving the arguments their names.
        source = next(iter([*ctx.args, ctx.params.get("source")]))
        if not source or source == "-" or is_url(source):
            return []
        try:
            with open_elsa(source) as file:
                names = [level.name for level in file.levels]
        except (ElsaError, OSError):
            return []
        return [CompletionItem(name) for name in (*names, "dense") if name.startswith(incomplete)]


class SparsityType(click.ParamType):  # type: ignore[type-arg]
    """A sparsity in percent, or as a fraction below 1."""

    name = "percent"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            number = float(str(value).removesuffix("%"))
        except ValueError:
            self.fail(f"{value!r} is not a percentage", param, ctx)
        number = number / 100 if number >= 1 or str(value).endswith("%") else number
        if not 0 <= number <= 1:
            self.fail(f"{value!r} is not between 0 and 100 percent", param, ctx)
        return number


def level_options(function: F) -> F:
    """How a level is chosen: by number or name, by sparsity, by size."""
    for option in (
        click.option(
            "--max-size", type=SizeType(), help="The densest level whose file is not larger."
        ),
        click.option(
            "--sparsity",
            type=SparsityType(),
            help="The densest level with at least this many zeros.",
        ),
        click.option(
            "-l",
            "--level",
            type=LevelType(),
            help="The level: 1 (sparsest) to T, its name, or dense.",
        ),
    ):
        function = option(function)
    return function


def one_level(options: Mapping[str, Any]) -> None:
    """Refuse two ways to choose a level; whether one is needed, the file tells."""
    if sum(options[name] is not None for name in ("level", "sparsity", "max_size")) > 1:
        raise click.UsageError("Give one of --level, --sparsity and --max-size.")


def shard_size_option(function: F) -> F:
    """How large the shards of an output are."""
    return click.option(
        "--max-shard-size",
        type=SizeType(),
        help="With an OUT.index.json or a directory: most bytes of a shard.",
    )(function)
