"""What the commands share, for commands of other packages too (entry points `elsa.commands`)."""

import contextlib
import errno
import json
import math
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ParamSpec, TextIO, TypeVar

import click
from click.shell_completion import CompletionItem

from elsa_format import __version__
from elsa_format._container.index import is_index, is_url, shown
from elsa_format._destination import goes_to_directory, written_size
from elsa_format._errors import ElsaError, MissingExtra, escape
from elsa_format._installed import install_command
from elsa_format._kernels import NATIVE, kernels
from elsa_format._output import descriptor, open_output
from elsa_format._progress import UNITS, progress, show_size
from elsa_format._progress import columns as terminal_columns
from elsa_format._start import wait_if_ending
from elsa_format.levels import parse_sparsity

__all__ = [
    "FORCE",
    "JOBS",
    "JSON",
    "LEVEL",
    "MAX_BYTES",
    "OUTPUT",
    "PRINTED",
    "QUIET",
    "SETTINGS",
    "SPARSITY",
    "VERSION",
    "LevelType",
    "MetricType",
    "SizeType",
    "SparsityType",
    "answer",
    "check_shards",
    "columns",
    "common_options",
    "cut",
    "escape",
    "install_command",
    "keep_apart",
    "level_options",
    "metric_options",
    "needs_extra",
    "one_level",
    "progress",
    "report",
    "reports_errors",
    "say",
    "shard_size_option",
    "share",
    "show_estimate",
    "show_size",
    "shown",
    "standard_input",
    "standard_output",
    "table",
    "wrap",
    "written_size",
]

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
C = TypeVar("C", bound=click.Command)
PLAIN = str.maketrans({"×": "x", "…": "...", "≤": "<=", "±": "+-"})
"""For terminals that know ASCII only."""
NARROWEST = 40
"""Columns of a terminal that tables still fit."""
NAMES = 3 / 8
"""The part of a line to which names are cut before columns are left out."""

SETTINGS = {"help_option_names": ["-h", "--help"]}


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
    "-o",
    "--output",
    "target",
    metavar="OUT",
    required=True,
    help="File, URL such as s3://…, or - for stdout.",
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
    """A sparsity in percent, as a fraction below 1, or N:M."""

    name = "percent"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        try:
            return parse_sparsity(value)
        except ElsaError as error:
            self.fail(str(error), param, ctx)


class MetricType(click.ParamType):  # type: ignore[type-arg]
    """A metric and a number: accuracy=0.93."""

    name = "name=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, _, number = value.rpartition("=")
        try:
            found = float(number) if name and number.isascii() and "_" not in number else math.nan
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a metric and a number, such as accuracy=0.93", param, ctx)
        return name, found


LEVEL = click.option(
    "-l", "--level", type=LevelType(), help="The level: 1 (sparsest) to T, its name, or dense."
)
SPARSITY = click.option(
    "--sparsity",
    type=SparsityType(),
    help="The densest level with at least this many zeros: 90, 0.9, 90% or 2:4.",
)


def level_options(function: F) -> F:
    """How a level is chosen: by number or name, by sparsity, by size, by metrics."""
    function = metric_options(function)
    for option in (
        click.option(
            "--max-size", type=SizeType(), help="The densest level whose file is not larger."
        ),
        SPARSITY,
        LEVEL,
    ):
        function = option(function)
    return function


def metric_options(function: F) -> F:
    """How a level is chosen by its metrics."""

    def mapping(ctx: Any, param: click.Parameter, pairs: Sequence[tuple[str, float]]) -> Any:
        if len(dict(pairs)) < len(pairs):
            raise click.BadParameter("the same metric twice", ctx, param)
        return dict(pairs) or None

    for keyword, bound in (("max", "no more than this"), ("min", "at least this")):
        function = click.option(
            f"--{keyword}",
            keyword,
            type=MetricType(),
            multiple=True,
            callback=mapping,
            help=f"The sparsest level whose metric is {bound}; with a limit of bytes or time, the "
            "best that keeps it.",
        )(function)
    return function


def one_level(options: Mapping[str, Any]) -> bool:
    """Refuse two ways to choose a level; whether one is given. If one is needed, the file tells."""
    from elsa_format._choose import LevelChoice  # only here, as it takes long to import

    return LevelChoice.of(options).given


def common_options(function: F) -> F:
    """What the commands of this package have besides; their errors are reported."""
    wrapped: Any = reports_errors(function)
    for option in (VERSION, QUIET, JSON, FORCE):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[no-any-return]


def shard_size_option(function: F) -> F:
    """How large the shards of an output are."""
    return click.option(
        "--max-shard-size",
        type=SizeType(),
        help="With an OUT.index.json or a directory: most bytes of a shard.",
    )(function)


def reports_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors into one line on stderr and the exit code users can test for.

    0 ok, 1 I/O, 2 usage, 3 invalid file, 130 interrupted.
    """
    return errors_reported()(function)


@contextlib.contextmanager
def errors_reported() -> Iterator[None]:
    """What is raised inside ends the process, as `reports_errors` says."""
    try:
        yield
        context = click.get_current_context(silent=True)
        if context is None or not context.params.get("quiet"):
            _mention_numpy()
    except click.ClickException as error:
        _show(error)
        sys.exit(error.exit_code)
    except ElsaError as error:
        _fail(error.worded(_option, "elsa-{}".format), error.exit_code)
    except BrokenPipeError:
        # The reader went away (`| head`); nothing is wrong, and nobody is there to be told.
        _give_up(sys.stdout)
        sys.exit(141)
    except OSError as error:
        _give_up(sys.stdout)
        name = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        _fail(f"{name}{error.strerror or error}", 1)
    except MemoryError:
        _fail("out of memory", 1)
    except (KeyboardInterrupt, click.Abort):  # only where `_start` does not hear it
        sys.exit(130)


def needs_extra(
    extra: str,
    what: str,
    modules: Sequence[str],
    *,
    free: Sequence[str] = (),
    unless: Callable[[Sequence[str]], bool] = lambda words: False,
) -> Callable[[C], C]:
    """Let a command say which extra it lacks before it reads a word; help, and `free`, need none.

    The modules are looked for, and not imported. What `unless` is true of, a command's words,
    needs none either.
    """

    @reports_errors
    def refuse() -> None:
        from importlib.util import find_spec

        for module in modules:
            if find_spec(module) is None:
                raise MissingExtra.of(ModuleNotFoundError(name=module), what, extra)

    def decorate(command: C) -> C:
        parse = command.parse_args

        def parse_args(ctx: click.Context, args: list[str]) -> list[str]:
            words = {"--version", *SETTINGS["help_option_names"], *free}
            if (
                not ctx.resilient_parsing
                and words.isdisjoint(arg.partition("=")[0] for arg in args)
                and not unless(args)
            ):
                refuse()
            return parse(ctx, args)

        command.parse_args = parse_args  # type: ignore[method-assign]
        return command

    return decorate


def _show(error: click.ClickException) -> None:
    """Say what is wrong with the words of a command, as other errors are said."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        say(error.format_message(), err=True)
        return
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is not None:
        usage = context.get_usage()
        say(f"{usage}\nTry '{context.command_path} --help' for help.\n", err=True)
    say(f"error: {error.format_message()}", err=True)


def _option(name: str, value: object) -> str:
    """An option in the words of the command that runs."""
    context = click.get_current_context(silent=True)
    params = context.command.params if context else []
    words = [opt for param in params if param.name == name for opt in param.opts]
    option = max(words, key=len, default=f"--{name.replace('_', '-')}")
    return option if value in (None, True) else f"{option} {shlex.quote(str(value))}"


def _fail(message: str, code: int) -> None:
    say(f"error: {message}", err=True)
    sys.exit(code)


def say(text: str, *, err: bool = False) -> None:
    """Print for people, if they are there; what is in a hostile name cannot steer the terminal."""
    wait_if_ending()
    stream = sys.stderr if err else sys.stdout
    if stream is None:  # closed by the caller (`>&-`)
        return
    text = "\n".join(escape(line) for line in text.split("\n"))
    encoding = stream.encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(PLAIN).encode(encoding, "backslashreplace").decode(encoding)
    try:
        click.echo(text, err=err)
    except OSError as error:
        if not err:
            raise OSError(error.errno, error.strerror, stream.name) from None
        _give_up(stream)


def answer(text: str, target: str = "-", *, force: bool = False) -> None:
    """Print what was asked for; that it cannot be printed is an error."""
    if target == "-":
        _opened(sys.stdout, "<stdout>")
        say(text)
        return
    with open_output(target, force=force, in_order=True) as output:
        output.write_at(0, f"{text}\n".encode("utf-8", "backslashreplace"))
        output.commit()


def report(
    result: dict[str, Any], summary: str, target: str, *, as_json: bool, quiet: bool
) -> None:
    """Tell what was written: to people on stderr, or as JSON on stdout unless the data is there."""
    text = json.dumps({"output": shown(target), **result}, indent=2)
    if as_json and target != "-" and descriptor(target) != 1:
        answer(text)
    elif as_json or (summary and not quiet):
        say(text if as_json else wrap(summary, columns(err=True)), err=True)


def keep_apart(source: str, target: str) -> None:
    """Refuse to replace a file by what is said about it."""
    paths = (source, target)
    if all(os.path.exists(path) for path in paths) and os.path.samefile(*paths):
        raise click.UsageError("The output would replace the file it describes.")


def _mention_numpy() -> None:
    """Say that the C module is missing: on a terminal, once to each user about each version."""
    chosen = NATIVE or os.environ.get("ELSA_PURE_PYTHON") == "1"
    if chosen or sys.stderr is None or not sys.stderr.isatty():
        return
    try:
        given = os.environ.get("XDG_CACHE_HOME", "")
        cache = Path(given if os.path.isabs(given) else Path.home() / ".cache", "elsa")
        cache.mkdir(parents=True, exist_ok=True)
        (cache / f"numpy-{__version__}").touch(exist_ok=False)
    except (OSError, RuntimeError):  # said before, or no home that would remember it
        return
    say(
        "note: numpy does the work of the C module, which was not built (no compiler?): the same "
        "bits, but slower. This is said once; elsa --version shows which kernels run.",
        err=True,
    )


def _give_up(stream: Any) -> None:
    """Let Python not try once more to write what cannot be written, and complain, when it ends."""
    if stream is not None and stream in (sys.__stdout__, sys.__stderr__):  # not a test's
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def standard_input() -> IO[bytes]:
    """Standard input as bytes."""
    return _opened(sys.stdin, "<stdin>").buffer


def standard_output() -> IO[bytes]:
    """Standard output as bytes."""
    return _opened(sys.stdout, "<stdout>").buffer


def _opened(stream: TextIO | None, name: str) -> TextIO:
    if stream is None:  # closed by the caller
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), name)
    return stream


def check_shards(source: str, out: str, max_shard_size: int | None) -> None:
    """Refuse a shard size for an output that is one file."""
    if max_shard_size is None or is_index(out) or goes_to_directory(source, out):
        return
    raise click.UsageError("--max-shard-size is for an OUT that ends in .index.json.")


def columns(target: str = "-", *, err: bool = False, narrowest: int = NARROWEST) -> int | None:
    """The width that text has to fit: that of a terminal; None elsewhere, where text is complete.

    Args:
        target: What OUT is; only what is printed is shown on a terminal.
        err: Whether it is printed to standard error.
        narrowest: The least that is given, for what needs some room.
    """
    stream = sys.stderr if err else sys.stdout
    if target != "-" or stream is None or not stream.isatty():
        return None
    return max(terminal_columns(stream), narrowest)


def table(rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None) -> str:
    """Rows in columns: text to the left, numbers to the right.

    To fit a width, text is cut in the middle, then the last columns are left out.

    >>> print(table([["name", "kept"], ["layer.0.weight", "5 %"]], width=60))
    name            kept
    layer.0.weight   5 %

    Args:
        rows: The cells; the first row is the head.
        left: How many of the first columns are text.
        width: The most characters in a line, or None.
    """
    safe = [[escape(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*safe, strict=True)]
    if width is not None:
        safe, widths = _fitted(safe, widths, left, width)
    lines = []
    for row in safe:
        cells = [
            cut(cell, size).ljust(size) if at < left else cell.rjust(size)
            for at, (cell, size) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _fitted(
    rows: list[list[str]], widths: list[int], left: int, width: int
) -> tuple[list[list[str]], list[int]]:
    """Rows without the last columns, if they need not fit, and the widths to cut names to."""
    names = [min(size, int(NAMES * width)) for size in widths[:left]]
    kept = len(widths)
    while kept > left and sum(names) + 2 * (left - 1) + sum(s + 2 for s in widths[left:]) > width:
        kept -= 1
        widths = [*widths[:kept], 1]
    if kept < len(rows[0]):
        rows = [[*row[:kept], "…"] for row in rows]
    names, room = widths[:left], width - sum(s + 2 for s in widths[left:])
    while sum(names) + 2 * (left - 1) > room and max(names) > 1:
        names[names.index(max(names))] -= 1
    return rows, [*names, *widths[left:]]


def share(some: int, of: int) -> str:
    """A part in percent, for people.

    >>> share(47, 100), share(999_999, 1_000_000), share(0, 0)
    ('47%', '>99.9%', '0%')
    """
    percent = 100 * some / of if of else 0.0
    if 0 < percent < 0.1 or 99.9 < percent < 100:
        return "<0.1%" if percent < 50 else ">99.9%"
    return f"{percent:.3g}%"


def show_estimate(size: int) -> str:
    """A size that is about right.

    >>> show_estimate(46_234_567)
    '~46 MB'
    """
    return f"~{show_size(float(f'{size:.2g}'))}"


def cut(text: str, size: int) -> str:
    """Text of at most so many characters: what is in the middle is left out.

    >>> cut("encoder.layer.0.weight", 11)
    'encod…eight'
    """
    if len(text) <= size:
        return text
    return f"{text[: size // 2]}…{text[len(text) - (size - 1) // 2 :]}"


def wrap(text: str, width: int | None, *, indent: int = 2) -> str:
    """Lines that fit a width, broken between words; those that follow are indented.

    Args:
        text: The lines.
        width: The most characters in a line, or None.
        indent: How far the lines that follow are indented.
    """
    if width is None:
        return text
    fill = textwrap.TextWrapper(
        width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    ).fill
    return "\n".join(fill(line) if len(line) > width else line for line in text.split("\n"))
