"""Sizes from the header alone."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from internals import LAYOUT_NAMES

import elsa_format as elsa

VALID = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "valid"
FILES = [path for path in sorted(VALID.glob("*.safetensors")) if "level_" not in path.stem]


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_size_of_a_level_is_that_of_its_file(path: Path, layout: Any) -> None:
    with elsa.open(path) as file:
        levels: list[Any] = [1, len(file.levels), *(["dense"] if layout == "dense" else [])]
        for level in levels:
            out = io.BytesIO()
            elsa.extract(path, out, level=level, layout=layout)
            assert file.size(level, layout) == len(out.getvalue())


@pytest.mark.parametrize("metadata", [{}, {"a": 'é"\n'}])
def test_sizes_with_awkward_names(metadata: dict[str, str]) -> None:
    rng = np.random.default_rng(0)
    shapes: list[tuple[int, ...]] = [(3, 5), (2, 0), (1,), (), (40, 30), (1, 2, 3, 4)]
    names = ["a", "\n", 'é"', "𝄞", "b" * 300, "\\"]
    arrays = {
        n: rng.standard_normal(s).astype(np.float16) for n, s in zip(names, shapes, strict=True)
    }
    buffer = io.BytesIO()
    elsa.write(
        buffer,
        {
            n: elsa.embed_counters(a, np.arange(a.size).reshape(a.shape) % 3, 2)
            for n, a in arrays.items()
        },
        levels=[elsa.LevelSpec('"x"'), elsa.LevelSpec("é")],
        nested=[n for n in names if n != "b" * 300],
        metadata=metadata,
    )
    with elsa.open(buffer) as file:
        for level in (1, 2):
            for layout in LAYOUT_NAMES:
                out = io.BytesIO()
                elsa.extract(io.BytesIO(buffer.getvalue()), out, level=level, layout=layout)
                assert file.size(level, layout) == len(out.getvalue())
