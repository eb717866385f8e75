"""Every error the format raises, one class per defect, named as in the spec's registry.

ElsaError
├── FormatError                 the file or checkpoint is at fault (exit code 3)
│   ├── container   Truncated · HeaderTooLarge · InvalidJson · DuplicateKey · InvalidHeader
│   │               UnknownDtype · InvalidOffsets · TrailingData
│   ├── profile     NotElsa · UnsupportedVersion · UnsupportedFeature · InvalidProfile
│   │               ProfileMismatch
│   ├── data        CountMismatch · CounterOutOfRange · NonFinite · ChecksumMismatch
│   │               DigestMismatch · InvalidLayout
│   ├── shards      InvalidIndex · UnsafePath
│   ├── delivery    InvalidDelivery · Incomplete · OutdatedDelivery
│   └── packing     ZeroFrozen · BitsTooWide · NotNested · AlreadyPacked · TensorMismatch
│                   InvalidCheckpoint
├── InvalidOption               what was asked for is at fault, not the file (exit code 2)
│   ├── NoSuchLevel             the level asked for is not in the file
│   ├── NoLevelGiven            a level has to be chosen, and was not
│   ├── ConflictingOptions      options exclude one another, or one is missing that another needs
│   ├── TooLarge                the network takes more memory than allowed
│   └── packing     InfeasibleLevels · NoSuchTensor (a KeyError, too) · NoGraph, which are
│                   FormatErrors as well
├── OutputExists                the output is there already (exit code 1)
├── InputChanged                the input was modified while it was read (exit code 1)
├── RemoteError                 a URL cannot be read or written (exit code 1)
└── MissingExtra                a package is not installed that is needed (exit code 1)
"""

import re
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, ClassVar

from elsa_format._installed import PACKAGE, install_command

LONGEST_MESSAGE = 1000
"""Characters; names in a header may have millions."""

_COMPARED, _LONGEST_NAME = 1000, 200
"""Names to look for similar ones in, and their characters: there may be many, and long ones."""
_NAMED = re.compile(r"{(\w+)(\(\))?}")


class ElsaError(Exception):
    """Base of all errors; the message is one line that says file, tensor, found, expected.

    A hint says what to do. It names options as `{force}`, with their values in `options`, and
    functions as `{pack()}`: in the words of Python here, in those of a command where one fails.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "", **options: object) -> None:
        self.message, self.hint, self.options = message, hint, options
        super().__init__(self.worded(_keyword, "elsa_format.{}()".format))

    def __str__(self) -> str:
        return str(self.args[0])  # whatever KeyError and ImportError make of it

    def __reduce__(self) -> tuple[Any, ...]:
        """As it is: a subclass may be made of other arguments than those of this class."""
        return _again, (type(self), self.args), self.__dict__

    def worded(self, option: Callable[[str, object], str], function: Callable[[str], str]) -> str:
        """The message and its hint, with the options and functions it names in others' words."""
        if not self.hint:
            return _one_line(self.message)

        def word(found: re.Match[str]) -> str:
            name = found[1]
            return function(name) if found[2] else option(name, self.options.get(name))

        return _one_line(f"{self.message}; {_NAMED.sub(word, self.hint)}")


def _again(kind: type[ElsaError], arguments: tuple[Any, ...]) -> ElsaError:
    """An error of a kind, before what it knows is put back."""
    error = kind.__new__(kind)
    super(ElsaError, error).__init__(*arguments)
    return error


def _keyword(name: str, value: object) -> str:
    return f"{name}={'…' if value is None else repr(value)}"


def _one_line(text: str) -> str:
    """A short line whatever a hostile file put into a name: terminals and logs stay readable."""
    # Twice: escapes are longer than what they stand for, and nobody wants them by the million.
    return _shorten(escape(_shorten(text)))


def escape(text: str) -> str:
    """Text with everything that is not printable written as Python would."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _shorten(message: str) -> str:
    if len(message) <= LONGEST_MESSAGE:
        return message
    half = (LONGEST_MESSAGE - 3) // 2
    return f"{message[:half]} … {message[-half:]}"


class FormatError(ElsaError):
    """A file or checkpoint breaks the specification."""

    exit_code = 3


class Truncated(FormatError):
    """The file ends before the header or the data it declares."""


class HeaderTooLarge(FormatError):
    """The header length exceeds 100,000,000 bytes."""


class InvalidJson(FormatError):
    """The header or the profile is not restricted JSON."""


class DuplicateKey(FormatError):
    """A JSON object holds the same key twice."""


class InvalidHeader(FormatError):
    """The header's structure is not that of a safetensors file."""


class UnknownDtype(FormatError):
    """A tensor has a dtype this specification does not list."""


class InvalidOffsets(FormatError):
    """Offsets overlap, leave holes, or disagree with shape and dtype."""


class TrailingData(FormatError):
    """Bytes follow the last tensor."""


class NotElsa(FormatError):
    """A valid safetensors file without an ELSA profile."""


class UnsupportedVersion(FormatError):
    """The profile's major version is not 1."""


class UnsupportedFeature(FormatError):
    """The profile requires a feature this reader does not know."""


class InvalidProfile(FormatError):
    """The profile document breaks its schema."""


class ProfileMismatch(FormatError):
    """The profile does not fit the tensors of the file."""


class CountMismatch(FormatError):
    """A number of kept weights disagrees with the profile."""


class CounterOutOfRange(FormatError):
    """A counter exceeds the number of levels."""


class NonFinite(FormatError):
    """A nested tensor holds Inf or NaN."""


class ChecksumMismatch(FormatError):
    """Stored bytes do not have the checksum the profile gives."""


class DigestMismatch(FormatError):
    """A level's content does not have the digest the profile gives."""


class InvalidLayout(FormatError):
    """A bitmask or CSR level file contradicts itself."""


class InvalidIndex(FormatError):
    """A shard index is malformed or does not fit its shards."""


class UnsafePath(FormatError):
    """A file name leaves the directory it must stay in."""


class InvalidDelivery(FormatError):
    """A delivery file contradicts itself or the header of its source."""


class Incomplete(FormatError):
    """The beginning of a delivery file ends before the part that was asked for does."""


class OutdatedDelivery(FormatError):
    """A delivery file was made of another state of its network."""


class ZeroFrozen(FormatError):
    """A zero weight is marked as frozen; with a counter it would become a denormal."""


class BitsTooWide(FormatError):
    """The counter does not fit the dtype's mantissa."""


class NotNested(FormatError):
    """A weight of a sparser level is missing or differs in a denser one."""


class AlreadyPacked(FormatError):
    """The checkpoint to pack is an ELSA file already."""


class TensorMismatch(FormatError):
    """Two checkpoints disagree about names, shapes, dtypes or shared values."""


class InvalidCheckpoint(FormatError):
    """A checkpoint cannot be read."""


class InvalidOption(ElsaError, ValueError):
    """What was asked for is not possible, or not with this file; the file is not at fault."""

    exit_code = 2


class NoSuchLevel(InvalidOption):
    """The level asked for is not in the file."""


class NoLevelGiven(InvalidOption, TypeError):
    """A level has to be chosen, and was not."""


class ConflictingOptions(InvalidOption, TypeError):
    """Options exclude one another, or one is missing that another needs."""


class TooLarge(InvalidOption):
    """The network takes more memory than the caller allows."""

    @classmethod
    def of(cls, what: str, max_bytes: int) -> "TooLarge":
        """For what is larger than the caller's limit."""
        return cls(f"{what}, more than the {max_bytes} that are allowed", "see {max_bytes}")


class InfeasibleLevels(InvalidOption, FormatError):
    """The requested levels cannot be made from these weights."""


class NoSuchTensor(InvalidOption, TensorMismatch, KeyError):
    """No tensor has the name that was asked for, or matches the pattern."""

    @classmethod
    def of(cls, where: str, problem: str, name: object, names: Iterable[str]) -> "NoSuchTensor":
        """For a name or pattern that no tensor has: those that are like it, or a few."""
        from difflib import get_close_matches  # only where something is wrong

        compared = [known for known in islice(names, _COMPARED) if len(known) <= _LONGEST_NAME]
        like = get_close_matches(str(name)[:_LONGEST_NAME], compared, cutoff=0.5)
        known = ", ".join(map(repr, like or compared[:3])) or "none"
        return cls(f"{where}: {problem} {name!r}; {'similar' if like else 'some'} names: {known}")


class NoGraph(InvalidOption, InvalidCheckpoint):
    """A template is wanted of a checkpoint that holds no graph."""


class OutputExists(ElsaError):
    """The output exists and may not be replaced."""


class InputChanged(ElsaError):
    """The input was modified while it was read."""


class RemoteError(ElsaError):
    """A URL cannot be read, or not be written."""

    def __init__(
        self, message: str, hint: str = "", *, status: int | None = None, **options: object
    ) -> None:
        super().__init__(message, hint, **options)
        self.status = status
        """What the server answered, if that was no file: 404, 403, …"""


class MissingExtra(ElsaError, ImportError):
    """A package is not installed that is needed for what was asked."""

    @classmethod
    def of(
        cls, error: ImportError, what: str, extra: str, package: str = PACKAGE
    ) -> "MissingExtra":
        """For a failed import: what needs it, and which extra of which package brings it."""
        if not isinstance(error, ModuleNotFoundError):
            return cls(f"{what}: {error}")  # it is there, and broken
        module = str(error.name).partition(".")[0]
        return cls(f"{what} needs {module}; run: {install_command(extra, package)}")
