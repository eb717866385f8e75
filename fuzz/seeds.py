"""What the targets start from: the specification's vectors, and cases found before."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import elsa_format as elsa
from fuzz import answers, fetching

HERE = Path(__file__).resolve().parent
VECTORS = HERE.parent / "spec" / "vectors"
CORPUS = HERE / "corpus"
MAX_SEED = 1 << 15


@cache
def seeds(target: str) -> tuple[bytes, ...]:
    """All small files to start from, in a fixed order."""
    kept = sorted((CORPUS / target).glob("*")) if (CORPUS / target).is_dir() else []
    found = [path.read_bytes() for path in kept]
    if target in ("header", "extract"):
        found += _vectors("valid") + _vectors("invalid") + [_packed()]
    elif target == "level":
        found += _vectors("valid", "level_*") + _vectors("valid/level_shards") + _levels()
        found += _vectors("invalid/InvalidLayout") + _vectors("valid", "names")
    elif target == "index":
        paths = [*VECTORS.glob("valid/*/*.json"), *VECTORS.glob("invalid/*/*.json")]
        found += [path.read_bytes() for path in sorted(paths)]
    elif target == "pack":
        found += [b"\0" + _plain(), *(b"\1" + npz for npz in _npz())]
    elif target in ("kernels", "integers"):
        rng = np.random.default_rng(0)
        found += [bytes([function]) + rng.bytes(200) for function in range(16)]
    elif target == "http":
        found += answers.seeds()
    elif target == "fetch":
        found += fetching.seeds()
    elif target == "delivery":
        files = _vectors("valid/delivery") + _vectors("invalid", "*.ship")
        rng = np.random.default_rng(0)
        found += [b"\0" + file for file in files if len(file) < 6000]
        found += [b"\xff" + rng.bytes(200) for _ in range(16)]
    return tuple(found)


def found_before(target: str) -> tuple[bytes, ...]:
    """What atheris kept on this machine because it reached new code."""
    folder = HERE / ".found" / target
    return tuple(path.read_bytes() for path in sorted(folder.glob("*")))


def _vectors(folder: str, name: str = "*") -> list[bytes]:
    paths = sorted((VECTORS / folder).rglob(f"{name}.safetensors"))
    return [path.read_bytes() for path in paths if path.stat().st_size <= MAX_SEED]


def _network() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "w": rng.standard_normal((4, 6)).astype(np.float32),
        "v": rng.standard_normal((3, 2, 3)).astype(np.float16),
        "b": rng.standard_normal(3).astype(np.float64),
        "step": np.array(3, np.int64),
    }


def _packed() -> bytes:
    out = io.BytesIO()
    elsa.pack(_network(), out, sparsities=[75, 50])
    return out.getvalue()


def _levels() -> list[bytes]:
    found = []
    for layout in ("dense", "bitmask", "csr"):
        out = io.BytesIO()
        elsa.extract(io.BytesIO(_packed()), out, level=2, layout=layout)
        found.append(out.getvalue())
    return found


def _plain() -> bytes:
    out = io.BytesIO()
    elsa.extract(io.BytesIO(_packed()), out, level="dense")
    return out.getvalue()


def _npz() -> list[bytes]:
    found = []
    for save in (np.savez, np.savez_compressed):
        out = io.BytesIO()
        arrays: dict[str, Any] = {k: np.asfortranarray(v) for k, v in _network().items()}
        save(out, **arrays)
        found.append(out.getvalue())
    return found
