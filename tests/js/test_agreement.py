"""The JavaScript package says what Python says: of texts, files, levels, bit by bit."""

import hashlib
import json
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xxhash
from conftest import ROOT, Judge

import elsa_format

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "conformance"))

from test_differential import UNORDERED, damage
from vector_files import COMMITTED, Vector, read_manifest

from spec import plain_delivery, plain_elsa

VALID = [vector for vector in read_manifest(COMMITTED) if vector["verdict"] == "valid"]
PIECES = (
    *(
        '{"a":1}',
        '{"a":{"b":[1,2,{}]}}',
        '{"é":"\\u00e9","__proto__":{"x":0}}',
        '{"10":1,"9":2,"":3}',
    ),
    *(
        '{"a":9007199254740993}',
        '{"a":9223372036854775807}',
        '{"a":-0}',
        '{"a":1e400}',
        '{"a":1.0}',
    ),
    *('{"a":"\\ud83e\\udd99"}', '{"a":"\\ud800"}', '{"a":"\\udd99\\ud83e"}', '{"a":"\x7f\u2028"}'),
    *('{"a":5e-324,"b":2.5e-324,"c":1.7976931348623157e308}', '{"a":0.1,"b":[true,false,null]}'),
)
BITS = (
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "0",
    "-",
    ".",
    "e",
    "E+1",
    " ",
    "\t",
    "\n",
    "\x00",
    "\x1f",
)
MORE = (
    *BITS,
    "\ufeff",
    "\\u0061",
    "\\uD800",
    "\\uDC00",
    "\\/",
    "1",
    "01",
    "true",
    "nul",
    "é",
    "🦙",
    '"a":1,',
)


def spell(value: Any) -> Any:
    """A value as judge.mjs spells it."""
    match value:
        case dict():
            return {"object": [[key, spell(v)] for key, v in value.items()]}
        case list():
            return {"array": [spell(v) for v in value]}
        case bool() | None | str():
            return value
        case int():
            return {"integer": str(value)}
        case float():
            return {"real": f"{struct.unpack('>Q', struct.pack('>d', value))[0]:x}"}
    raise AssertionError(value)


def text_of(choose: random.Random) -> bytes:
    """JSON, often with something wrong."""
    text = choose.choice(PIECES)
    for _ in range(choose.randrange(3)):
        at = choose.randrange(len(text) + 1)
        text = text[:at] + choose.choice(MORE) + text[at + choose.randrange(3) :]
    if choose.random() < 0.02:
        text = '{"a":' * choose.choice([31, 32, 33]) + "1" + "}" * 33
    raw = text.encode()
    if choose.random() < 0.1:
        at = choose.randrange(len(raw))
        raw = raw[:at] + bytes([choose.randrange(256)]) + raw[at + 1 :]
    return raw


def parse(raw: bytes, header: bool) -> dict[str, Any]:
    """What the plain parser of the specification makes of a text."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return {"error": "InvalidJson"}
    try:
        if header:
            if not text.startswith("{") or not text.rstrip(" ").endswith("}"):
                return {"error": "InvalidJson"}
            return {"value": spell(plain_elsa.Json(text, header=True).document())}
        return {"value": spell(plain_elsa.parse_document(text))}
    except plain_elsa.Bad as bad:
        return {"error": bad.error}


@pytest.mark.parametrize("header", [False, True], ids=["document", "header"])
def test_json(judge: Judge, header: bool) -> None:
    choose = random.Random(5)
    for _ in range(2000):
        raw = text_of(choose)
        found, expected = judge.answer("json", text=raw, header=header), parse(raw, header)
        if "error" in expected and "error" in found:
            names = {found["error"], expected["error"]}
            assert names <= {"InvalidJson", "DuplicateKey"}, raw
            assert "\n" not in found["message"]
        else:
            assert found == expected, raw


def test_hashes(judge: Judge) -> None:
    choose = random.Random(7)
    lengths = [*range(260), 511, 512, 513, 1024, 65535, 65536, 65537, 65600, 131072, 131073]
    for length in lengths:
        data = choose.randbytes(length)
        for seed in (0, choose.getrandbits(64)):
            expected = "xxh3:" + xxhash.xxh3_64_hexdigest(data, seed)
            assert judge.value("xxh3", bytes=data, seed=str(seed)) == expected, (length, seed)
        expected = hashlib.sha256(data).hexdigest()
        assert judge.value("sha256", bytes=data, size=choose.choice([1, 7, 64, 10**6])) == expected


def network(seed: int, folder: Path) -> Path:
    """A valid file of anything: dtypes, shapes, levels, names, variants, words."""
    choose = random.Random(seed)
    rng = np.random.default_rng(seed)
    levels = choose.choice([1, 2, 3, 5, 12])
    bits = choose.randint(levels.bit_length(), 7)
    shapes = [(), (0,), (1,), (7,), (3, 5), (4, 0, 2), (2, 3, 4, 5), (1, 1), (130, 9), (33000,)]
    names = ["w", "é/🦙", "__proto__", "10", "9", "", "a\nb", "～", "conv.weight"]
    choose.shuffle(names)
    tensors: dict[str, np.ndarray] = {}
    nested = names[: choose.randint(1, 5)]
    for name in nested:
        dtype = choose.choice([np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
        shape = choose.choice(shapes)
        width = np.dtype(dtype).itemsize
        words = rng.integers(0, 2 ** (8 * width) - 1, shape, f"u{width}", endpoint=True)
        mantissa = {4: 23, 8: 52, 2: 10 if dtype is np.float16 else 7}[width]
        # Finite, so that not all exponent bits are set; denormals and zeros among them.
        words = np.asarray(words & ~np.array(1 << mantissa, words.dtype))
        counters = rng.integers(0, levels + 1, shape) * (rng.random(shape) < choose.random())
        low = np.array(2**bits - 1, words.dtype)
        tensors[name] = np.asarray((words & ~low) | counters.astype(words.dtype)).view(dtype)
    for name in names[len(nested) :]:
        dtype = choose.choice(
            [np.int64, np.uint8, np.bool_, np.float32, ml_dtypes.bfloat16, np.complex64]
        )
        tensors[name] = rng.integers(0, 2, choose.choice(shapes)).astype(dtype)
    varying = [name for name in names[len(nested) :] if choose.random() < 0.4]
    path = folder / f"{seed}.safetensors"
    elsa_format.write(
        path,
        tensors,
        levels=[elsa_format.LevelSpec(f"{t}", metrics={"x": t / 7}) for t in range(levels)],
        nested=nested,
        bits=bits,
        per_level={
            name: [tensors[name] + tensors[name].dtype.type(t % 2) for t in range(levels)]
            for name in varying
        },
        metadata={"format": "pt", "ü": "\u2028"} if choose.random() < 0.5 else {},
    )
    return path


def hashed(loaded: dict[str, Any]) -> dict[str, str]:
    """The hash of the bytes of each array."""
    return {k: hashlib.sha256(np.ascontiguousarray(a)).hexdigest() for k, a in loaded.items()}


@pytest.mark.parametrize("seed", range(16))
def test_random_networks(judge: Judge, seed: int, tmp_path: Path) -> None:
    path = network(seed, tmp_path)
    choose = random.Random(seed)
    output, expected = tmp_path / "js", tmp_path / "python"
    found = judge.value("loadAll", path=path, kind="elsa")
    with elsa_format.open(path) as file:
        levels: list[Any] = [*range(1, len(file.levels) + 1), "dense"]
        for level in levels:
            bits = {name: data for name, (_, _, data) in found[str(level)].items()}
            assert bits == hashed(file.load(level)), level
    for level in [*choose.sample(levels[:-1], min(3, len(levels) - 1)), "dense"]:
        for layout in ("dense", "bitmask", "csr") if level != "dense" else ("dense",):
            chunk = choose.choice([0, 1, 7, 4096, 65537])
            output.unlink(missing_ok=True)
            expected.unlink(missing_ok=True)
            elsa_format.extract(path, expected, level=level, layout=layout)  # type: ignore[arg-type]
            judge.value(
                "extract", path=path, level=level, layout=layout, chunk=chunk, output=output
            )
            assert output.read_bytes() == expected.read_bytes(), (level, layout, chunk)
            if level != "dense":
                loaded = judge.value("loadAll", path=expected, kind="level")
                assert {k: v[2] for k, v in loaded.items()} == {
                    name: data for name, (_, _, data) in found[str(level)].items()
                }


@pytest.mark.parametrize("seed", range(3))
def test_random_deliveries(judge: Judge, seed: int, tmp_path: Path) -> None:
    path = network(100 + seed, tmp_path)
    shipped = tmp_path / "net.ship.safetensors"
    shipped.write_bytes(
        plain_delivery.ship(path.read_bytes(), block=random.Random(seed).randint(6, 12))
    )
    delivered = judge.value("loadAll", path=shipped, kind="delivery")
    assert delivered == judge.value("loadAll", path=path, kind="elsa")


def test_image_has_the_level_in_place(judge: Judge, rich: Path, tmp_path: Path) -> None:
    output = tmp_path / "image"
    judge.value("image", path=rich, level=2, output=output)
    raw, image = rich.read_bytes(), output.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert len(image) == len(raw)
    assert image[: 8 + length] == raw[: 8 + length]
    with elsa_format.open(rich) as file:
        for name, array in file.load(2).items():
            begin, end = header[name]["data_offsets"]
            assert image[8 + length + begin : 8 + length + end] == array.tobytes(), name


def verdict(action: Callable[[], object]) -> str | None:
    """The error that the plain implementation names."""
    try:
        action()
    except plain_elsa.Bad as bad:
        return bad.error
    return None


@pytest.mark.parametrize("kind", ["elsa", "level", "delivery"])
def test_damaged_files(judge: Judge, kind: str) -> None:
    key = {"elsa": "elsa", "level": "elsa_level", "delivery": "elsa_delivery"}[kind]
    check: Callable[[bytes], object] = {
        "elsa": plain_elsa.validate,
        "level": plain_elsa.load_level,
        "delivery": plain_delivery.validate,
    }[kind]
    for vector in [v for v in VALID if v["kind"] == kind and v.path.stat().st_size < 20_000]:
        compare_damaged(judge, vector, kind, key, check)


def compare_damaged(
    judge: Judge, vector: Vector, kind: str, key: str, check: Callable[[bytes], object]
) -> None:
    """Damage a file in a few ways, and compare verdicts."""
    choose = random.Random(vector["sha256"] + "js")
    for _ in range(12):
        raw = damage(vector.path.read_bytes(), key, choose)
        found = judge.answer("validate", bytes=raw, kind=kind).get("error")
        expected = verdict(lambda raw=raw: check(raw))  # type: ignore[misc]
        if found != expected:
            assert any({found, expected} <= names for names in UNORDERED), (vector["file"], raw)
