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
│   ├── delivery    InvalidDelivery · Incomplete
│   └── packing     ZeroFrozen · BitsTooWide · NotNested · AlreadyPacked · TensorMismatch
│                   InvalidCheckpoint
├── InvalidOption               what was asked for is at fault, not the file (exit code 2)
│   ├── NoSuchLevel             the level asked for is not in the file
│   ├── NoLevelGiven            a level has to be chosen, and was not
│   ├── TooLarge                the network takes more memory than allowed
│   └── packing     InfeasibleLevels · NoSuchTensor · NoGraph, which are FormatErrors too
├── OutputExists                the output is there already (exit code 1)
├── InputChanged                the input was modified while it was read (exit code 1)
├── RemoteError                 a URL cannot be read or written (exit code 1)
└── MissingExtra                a package is not installed that is needed (exit code 1)
"""

import re
from collections.abc import Callable
from typing import ClassVar

LONGEST_MESSAGE = 1000
"""Characters; names in a header may have millions."""

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

    def worded(self, option: Callable[[str, object], str], function: Callable[[str], str]) -> str:
        """The message and its hint, with the options and functions it names in others' words."""
        if not self.hint:
            return _one_line(self.message)

        def word(found: re.Match[str]) -> str:
            name = found[1]
            return function(name) if found[2] else option(name, self.options.get(name))

        return _one_line(f"{self.message}; {_NAMED.sub(word, self.hint)}")


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


class TooLarge(InvalidOption):
    """The network takes more memory than the caller allows."""

    @classmethod
    def of(cls, what: str, max_bytes: int) -> "TooLarge":
        """For what is larger than the caller's limit."""
        return cls(f"{what}, more than the {max_bytes} that are allowed", "see {max_bytes}")


class InfeasibleLevels(InvalidOption, FormatError):
    """The requested levels cannot be made from these weights."""


class NoSuchTensor(InvalidOption, TensorMismatch):
    """A pattern matches no tensor."""


class NoGraph(InvalidOption, InvalidCheckpoint):
    """A template is wanted of a checkpoint that holds no graph."""


class OutputExists(ElsaError):
    """The output exists and may not be replaced."""


class InputChanged(ElsaError):
    """The input was modified while it was read."""


class RemoteError(ElsaError):
    """A URL cannot be read, or not be written."""


class MissingExtra(ElsaError, ImportError):
    """A package is not installed that is needed for what was asked."""

    @classmethod
    def of(cls, error: ImportError, what: str, extra: str) -> "MissingExtra":
        """For a failed import: what it is needed for, and which extra brings it."""
        if not isinstance(error, ModuleNotFoundError):
            return cls(f"{what}: {error}")  # it is there, and broken
        package = str(error.name).partition(".")[0]
        return cls(f"{what} needs {package}; pip install 'elsa-format[{extra}]'")
