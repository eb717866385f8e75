"""What these tests need is installed by `make test-torch`; `make test` does without."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models are tiny, and threads wait for each other
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "onnx")]

NEEDED = {"*": "torch", "transformers*": "transformers", "trainer": "accelerate"}
NEEDED |= {"diffusers": "diffusers", "timm": "timm", "sentences": "sentence_transformers"}
"""What the tests of each kind import; where it is missing, test_available.py says so."""

collect_ignore_glob = [
    f"test_{kind}.py" for kind, package in NEEDED.items() if find_spec(package) is None
]
if "test_*.py" in collect_ignore_glob:
    collect_ignore_glob = ["test_[!a]*.py"]
