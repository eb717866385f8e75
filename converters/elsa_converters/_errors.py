"""Errors of the converters, beside those of elsa_format.

FormatError
├── InvalidOnnx          not an ONNX model, or one that contradicts itself
├── InvalidExternalData  external data that is missing, too short or out of its file
├── UnsupportedOnnx      valid, but not something a level can be exported to
├── InvalidData          what to measure on does not fit the network, or gave no numbers
├── TemplateMismatch     the template's tensors are not those of the ELSA file
└── MisplacedOutput      it can not point to its data, or has none to stand beside; InvalidOption

ElsaError
└── MissingOperators     the sparse operators were not built, for want of a C compiler
"""

from collections.abc import Sequence

from elsa_format import ElsaError, FormatError, InvalidOption, UnsafePath


class InvalidOnnx(FormatError):
    """The file is not a valid ONNX model."""


class InvalidExternalData(FormatError):
    """A tensor's external data is missing, too short or badly described."""


class UnsupportedOnnx(FormatError):
    """The model uses something that has no counterpart here."""


class InvalidData(FormatError):
    """The data to measure on does not fit the network, or the network gave no numbers for it."""


class MisplacedOutput(InvalidOption, UnsafePath, UnsupportedOnnx):
    """A model and its data cannot be where they were asked to be."""


class TemplateMismatch(FormatError):
    """The template's tensors are not those of the ELSA file; `rows` lists every difference."""

    def __init__(self, where: str, rows: Sequence[tuple[str, str, str]]) -> None:
        self.rows = tuple(rows)
        name, template, stored = rows[0]
        more = f" (and {len(rows) - 1} more)" if len(rows) > 1 else ""
        super().__init__(
            f"{where}: tensor {name!r}: the template has {template}, the ELSA file {stored}{more}"
        )

    def table(self) -> str:
        """The differences as aligned text, one tensor a line."""
        lines = [("tensor", "template", "ELSA file"), *map(_printable, self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(2)]
        return "\n".join(
            f"{name:<{widths[0]}}  {template:<{widths[1]}}  {stored}"
            for name, template, stored in lines
        )


def _printable(row: tuple[str, str, str]) -> tuple[str, str, str]:
    name = "".join(c if c.isprintable() else "?" for c in row[0])
    return name, *row[1:]


class MissingOperators(ElsaError):
    """The sparse operators were not built when this was installed."""

    def __init__(self, consequence: str, hint: str = "", **options: object) -> None:
        message = f"the sparse operators were not built, for want of a C compiler: {consequence}"
        super().__init__(message, hint, **options)
