"""A short, fixed run of the fuzz targets, and the hostile files that they found first."""

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from internals import main, parse

import elsa_format as elsa
from fuzz.short import inputs
from fuzz.targets import TARGETS, pipe

ROUNDS = {"header": 1200, "extract": 400, "level": 800, "pack": 200, "index": 200}
ROUNDS |= {"integers": 100, "kernels": 1500, "http": 1500, "delivery": 1200, "fetch": 400}


@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes(target: str) -> None:
    for data in inputs(target, ROUNDS[target], seed=1):
        try:
            TARGETS[target](data)
        except Exception as error:
            raise AssertionError(f"{target}: {error!r} on {data!r}") from error


def container(tensors: dict[str, Any], metadata: dict[str, str], data: bytes = b"") -> bytes:
    """A file with a header that is valid JSON, if nothing else."""
    header = json.dumps({"__metadata__": metadata, **tensors}).encode()
    return len(header).to_bytes(8, "little") + header + data


def tensor(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    """A tensor's entry."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def profile(nested: dict[str, list[int]], **others: Any) -> str:
    """A profile of one level."""
    kept = sum(counts[0] for counts in nested.values())
    document = {"version": "1.0", "bits": 1, "levels": [{"name": "a", "nonzero": kept}]}
    return json.dumps({**document, "nested": nested, **others})


def level_file(layout: str, tensors: dict[str, Any]) -> str:
    """The document of a level file."""
    return json.dumps(
        {"version": "1.0", "level": 1, "name": "a", "layout": layout, "tensors": tensors}
    )


def test_a_duplicate_among_very_many_keys_is_found_quickly() -> None:
    keys = ",".join(f'"{n}":0' for n in range(300_000))
    # Were it quadratic, this would take an hour.
    with pytest.raises(elsa.DuplicateKey, match="'299999'"):
        parse(f'{{{keys},"299999":0}}'.encode(), "x")


@pytest.mark.parametrize("letter", ["n", "\x85", "\U000e0001"])
def test_messages_stay_short_whatever_a_name_is(letter: str) -> None:
    with pytest.raises(elsa.InvalidHeader) as caught:
        parse(json.dumps({letter * 1_000_000: 1}).encode(), "net.safetensors")
    assert len(str(caught.value)) <= 1000
    assert str(caught.value).startswith("net.safetensors: tensor")


def test_names_cannot_steer_the_terminal(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "net.safetensors"
    elsa.pack({"\x1b[2J\nw": np.ones((4, 4), np.float32)}, path, sparsities=[50])
    with pytest.raises(SystemExit):
        main(["inspect", str(path)])
    shown = capfd.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[2J\nw" in shown


def test_missing_variants_are_not_listed_in_memory() -> None:
    """255 levels times many names would be gigabytes, named by a few megabytes."""
    names = sorted(f"n{n}" for n in range(30_000))
    tensors = {name: tensor("U8", [0], 0, 0) for name in names}
    levels = [{"name": "a", "nonzero": 0}] * 255
    text = profile({}, bits=8, levels=levels, per_level=names)
    with pytest.raises(elsa.ProfileMismatch, match="is missing"):
        elsa.open(io.BytesIO(container(tensors, {"elsa": text})))


def test_rows_without_columns_are_not_written() -> None:
    """A file of 300 bytes could ask for exabytes of row ends."""
    data = container({"w": tensor("F32", [2**52, 0], 0, 0)}, {"elsa": profile({"w": [0]})})
    assert elsa.verify(io.BytesIO(data)).nested == 1
    for layout in ("dense", "bitmask"):
        elsa.extract(io.BytesIO(data), io.BytesIO(), level=1, layout=layout)  # type: ignore[arg-type]
    with pytest.raises(elsa.UnsupportedFeature, match="use bitmask"):
        elsa.extract(io.BytesIO(data), io.BytesIO(), level=1, layout="csr")
    with elsa.open(io.BytesIO(data)) as file, pytest.raises(elsa.UnsupportedFeature):
        file.load(1, layout="csr")


def test_more_dimensions_than_numpy_has() -> None:
    shape = [1] * 70
    data = container({"w": tensor("U8", shape, 0, 1)}, {"elsa": profile({})}, b"\0")
    with elsa.open(io.BytesIO(data)) as file, pytest.raises(elsa.UnsupportedFeature, match="70"):
        file.load()
    parts = {
        "__elsa__.bitmask.w": tensor("U8", [1], 0, 1),
        "__elsa__.values.w": tensor("F32", [0], 1, 1),
    }
    text = level_file("bitmask", {"w": {"dtype": "F32", "shape": shape}})
    with pytest.raises(elsa.UnsupportedFeature, match="70"):
        elsa.load_level(io.BytesIO(container(parts, {"elsa_level": text}, b"\0")))


def test_a_pipe_that_declares_more_than_memory_is_truncated() -> None:
    size = 2**59
    declared = {"w": tensor("U8", [size], 0, size)}
    data = container(declared, {"elsa": profile({})}, bytes(10))
    with pytest.raises(elsa.Truncated):
        list(elsa.stream(pipe(data)))
    with pytest.raises(elsa.Truncated):
        elsa.load_level(pipe(container(declared, {}, bytes(10))))


@pytest.mark.parametrize(
    "changed",
    [
        {"version": "2.0"},
        {"version": None},
        {"requires": ["magic"]},
        {"level": 0},
        {"level": 256},
        {"name": ""},
        {"digest": "sha256:0"},
        {"tensors": None},
        {"tensors": {"w": {"dtype": "F32", "shape": [2**40, 2**40]}}},
    ],
)
def test_level_documents_that_the_specification_refuses(changed: dict[str, Any]) -> None:
    document = json.loads(level_file("bitmask", {})) | changed
    with pytest.raises(elsa.FormatError):
        elsa.load_level(io.BytesIO(container({}, {"elsa_level": json.dumps(document)})))


def test_a_shard_name_longer_than_names_may_be(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"w": "n" * 5000}}))
    for use in (elsa.verify, elsa.open, lambda p: elsa.pack(p, io.BytesIO(), sparsities=[50])):
        with pytest.raises(elsa.InvalidIndex) as caught:
            use(path)
        assert len(str(caught.value)) < 1100


def npy(header: str, data: bytes = b"") -> bytes:
    """An array file with any header."""
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


@pytest.mark.parametrize(
    ("member", "content"),
    [
        ("w.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 4)}")),
        ("w.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4)}", bytes(63))),
        ("w.npy", npy("{'descr': '<f4', 'fortran_order': True, 'shape': (4, 4)}", bytes(63))),
        ("w.npy", npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2**40, 2**40)}")),
        ("w.npy", npy("{'descr': '|O', 'fortran_order': False, 'shape': (4,)}")),
        ("w.npy", npy("{'descr': '<V2', 'fortran_order': False, 'shape': (4, 4)}", bytes(32))),
        ("w.npy", npy("(((((")),
        ("w.npy", b""),
        ("w", b"no array"),
    ],
)
def test_archives_that_are_no_checkpoints(tmp_path: Path, member: str, content: bytes) -> None:
    path = tmp_path / "w.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, content)
    with pytest.raises(elsa.InvalidCheckpoint, match="w"):
        elsa.pack(path, io.BytesIO(), sparsities=[50])


def test_an_archive_member_without_a_suffix(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    content = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4, 4)}", bytes(64))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("w", content)
    out = io.BytesIO()
    assert elsa.pack(path, out, sparsities=[50]).nested == ("w",)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("w.npy", content)
    with pytest.raises(elsa.InvalidCheckpoint, match="twice"):
        elsa.pack(path, io.BytesIO(), sparsities=[50])
