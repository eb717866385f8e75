"""Let benchmarks import private names from one module, as tests do: `from internals import …`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import internals  # noqa: F401 - from now on others import it

sys.path.pop()
