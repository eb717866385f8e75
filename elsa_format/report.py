"""The page about a file, for commands of other packages that have something to add to it."""

from elsa_format._report.page import write_report

__all__ = ["write_report"]
