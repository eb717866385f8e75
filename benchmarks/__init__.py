"""What ELSA costs, as ratios against a peer or the machine's limit, measured in the same run."""

from benchmarks import _private  # noqa: F401
