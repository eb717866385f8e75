"""What all commands share: errors, exit codes, version, progress, sizes, tables."""

import contextlib
import errno
import functools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, ParamSpec, TextIO

import click

from elsa_format import ElsaError, __version__, kernels
from elsa_format._index import is_index
from elsa_format._kernels import NATIVE

P = ParamSpec("P")
SETTINGS = {"help_option_names": ["-h", "--help"]}
JOBS = "Shards worked on at a time, each in its own few megabytes.  [default: 1]"

version_option = click.version_option(
    __version__, message=f"%(prog)s %(version)s (kernels: {kernels()})"
)


def reports_errors(function: Callable[P, None]) -> Callable[P, None]:
    """Turn errors into one line on stderr and the exit code users can test for.

    0 ok, 1 I/O, 2 usage, 3 invalid file, 130 interrupted.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            with _raising_on_sigterm():
                function(*args, **kwargs)
                if not kwargs.get("quiet"):
                    _mention_numpy()
        except ElsaError as error:
            _fail(str(error), error.exit_code)
        except BrokenPipeError:
            # The reader went away (`| head`); nothing is wrong, and nobody is there to be told.
            _give_up_stdout()
            sys.exit(141)
        except OSError as error:
            _give_up_stdout()
            name = f"{error.filename}: " if error.filename else ""
            _fail(f"{name}{error.strerror or error}", 1)
        except MemoryError:
            _fail("out of memory", 1)
        except KeyboardInterrupt:
            click.echo("", err=True)
            sys.exit(130)

    return wrapped


def say(text: str, *, err: bool = False) -> None:
    """Print; what a hostile file put into a name cannot steer the terminal."""
    stream = sys.stderr if err else sys.stdout
    if stream is None:  # closed by the caller (`>&-`)
        return
    lines = [line if line.isprintable() else escape(line) for line in text.split("\n")]
    encoding = stream.encoding or "utf-8"
    printable = "\n".join(lines).encode(encoding, "backslashreplace").decode(encoding)
    try:
        click.echo(printable, err=err)
    except OSError as error:
        raise OSError(error.errno, error.strerror, stream.name) from None


def escape(text: str) -> str:
    """Text with everything that is not printable written as Python would."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


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


def _give_up_stdout() -> None:
    """Let Python not try once more to write what cannot be written, and complain, when it ends."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _raising_on_sigterm() -> Iterator[None]:
    """Unwind on SIGTERM, so that temporary files go wherever they have a name."""

    def stop(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def standard_input() -> IO[bytes]:
    """Standard input as bytes."""
    return _open_stream(sys.stdin, "<stdin>")


def standard_output() -> IO[bytes]:
    """Standard output as bytes."""
    return _open_stream(sys.stdout, "<stdout>")


def _open_stream(stream: TextIO | None, name: str) -> IO[bytes]:
    if stream is None:  # closed by the caller
        raise OSError(errno.EBADF, os.strerror(errno.EBADF), name)
    return stream.buffer


def check_shards(out: str, max_shard_size: int | None) -> None:
    """Refuse a shard size for an output that is one file."""
    if max_shard_size is not None and not is_index(out):
        raise click.UsageError("--max-shard-size is for an OUT that ends in .index.json.")


def _fail(message: str, code: int) -> None:
    say(f"error: {message}", err=True)
    sys.exit(code)


class Bar:
    """A progress line on a terminal, from the first second on."""

    def __init__(self, verb: str) -> None:
        self.verb, self.started, self.drawn = verb, time.monotonic(), 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.started < 1 or now - self.drawn < 0.1:
            return
        self.drawn = now
        speed = done / (now - self.started)
        filled = int(30 * done / total) if total else 30
        left = int((total - done) / speed) if speed else 0
        sys.stderr.write(
            f"\r{self.verb} {'█' * filled}{'░' * (30 - filled)} {100 * done // max(total, 1):3d}%  "
            f"{show_size(speed)}/s  {left // 60}:{left % 60:02d} left\x1b[K"
        )
        sys.stderr.flush()


@contextlib.contextmanager
def progress(verb: str) -> Iterator[Callable[[int, int], object]]:
    """A progress callback that draws if stderr is a terminal, and cleans up after itself."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    bar = Bar(verb)
    try:
        yield bar
    finally:
        if bar.drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


class SizeType(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes: 20MB, 1.5GiB, 4096."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"([0-9.]+)\s*([KMGT]?)(i?)B?", value.strip(), re.IGNORECASE)
        try:
            if match is None:
                raise ValueError
            number, unit, binary = float(match[1]), match[2].upper(), match[3]
        except ValueError:
            self.fail(f"{value!r} is not a size such as 20MB or 1.5GiB", param, ctx)
        scale = 1024 ** list(_UNITS).index(unit) if binary else _UNITS[unit]
        return int(number * scale)


class LevelType(click.ParamType):  # type: ignore[type-arg]
    """A level: 1..T or dense."""

    name = "level"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if value == "dense" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is not a level: give its number, or 'dense'", param, ctx)


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


def show_size(size: float) -> str:
    """A size as people read it.

    >>> show_size(46_200_000)
    '46.2 MB'
    """
    for unit, scale in reversed(list(_UNITS.items())):
        if size >= scale and unit:
            return f"{size / scale:.3g} {unit.replace('K', 'k')}B"
    return f"{size:.0f} B"


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Rows in columns, the first `left` columns to the left, numbers to the right."""
    rows = [[cell if cell.isprintable() else escape(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
