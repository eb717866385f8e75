"""The HTML report of `elsa-inspect --html`, made from the JSON of `elsa-inspect --json`.

>>> import elsa_report
>>> elsa_report.write_report("net.safetensors", "report.html") > 10_000
True
"""

from elsa_report._page import render, write_report

__all__ = ["render", "write_report"]
