"""What ELSA costs, as ratios against a peer or the machine's limit, measured in the same run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import internals  # noqa: F401 - where private names are; from now on others import it

sys.path.pop()
