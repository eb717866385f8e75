"""Moved to the package `elsa_report`; this name stays for a release."""

import warnings
from typing import Any

from elsa_format._inspect import report_writer


def __getattr__(name: str) -> Any:
    if name != "write_report":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = "elsa_format.report.write_report is elsa_report.write_report now"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return report_writer()
