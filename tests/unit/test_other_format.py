"""Files of other kinds, made by those who make them, are named together with what to do."""

import gzip
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import elsa_format as elsa


def torch_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:  # as torch.save lays it out
        archive.writestr("archive/data.pkl", b"")


def onnx_model(path: Path) -> None:
    graph = helper.make_graph([], "g", [], [])
    onnx.save(helper.make_model(graph, producer_name="pytorch"), path)


def numpy_archive(path: Path) -> None:
    with open(path, "wb") as file:
        np.savez(file, w=np.ones((2, 2)))


def gzipped(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        file.write(b"weights")


def text(content: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "make", "kind", "advice"),
    [
        ("model.zip", torch_zip, "PyTorch", "elsa-pack reads it if its name ends in .pt"),
        ("old.pkl", lambda p: p.write_bytes(pickle.dumps({"weight": 1})), "pickle", "ends in .pt"),
        ("model.dat", numpy_archive, "numpy archive", ".npz"),
        ("w.npy", lambda p: np.save(p, np.ones(3)), "numpy array", "savez"),
        ("model.h5", text(b"\x89HDF\r\n\x1a\n" + bytes(64)), "HDF5", "safetensors"),
        ("model.gguf", text(b"GGUF\x03" + bytes(64)), "GGUF", "checkpoint"),
        ("graph.pb", onnx_model, "ONNX", ".onnx"),
        ("net.safetensors", text(b"version https://git-lfs.github.com/spec/v1"), "git-lfs", "pull"),
        ("net.safetensors", text(b"\n<!doctype html>\n"), "web page", "link"),
        ("net.index.json", text(b"<html>"), "web page", "link"),
        ("net.safetensors", text(b"<?xml version='1.0'?><Error/>"), "XML", "server's error"),
        ("index.json", text(b'{"weight_map": {}}'), "JSON", ".index.json"),
        ("net.safetensors.gz", gzipped, "gzip", "decompress"),
        ("net.safetensors", text(b""), "empty", "8 bytes"),
        ("passwd", text(b"root:x:0:0:root:/root:/bin/bash\n"), "text file", "a file of weights"),
        ("notes", text(("ä" * 63).encode()[1:]), "header of", "expected at most"),
        ("notes", text(("x" + "ä" * 63).encode()), "text file", "a file of weights"),
    ],
)
def test_files_of_other_kinds(
    tmp_path: Path, name: str, make: Callable[[Path], object], kind: str, advice: str
) -> None:
    path = tmp_path / name
    make(path)
    for read in (elsa.open, elsa.verify, elsa.load_level, lambda p: list(elsa.stream(p))):
        with pytest.raises(elsa.FormatError, match=f"{kind}.*{advice}"):
            read(path)
    with pytest.raises(elsa.FormatError, match=f"{kind}.*{advice}"):
        elsa.pack(path, io.BytesIO(), sparsities=[50])


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        (name, content, found)
        for name in ("net.npz", "net.onnx")
        for content, found in (
            (b"version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer.*git lfs pull"),
            (b"<!DOCTYPE html>\n<html>", "a web page; take the link of the file"),
            (b"root:x:0:0:root:/root:/bin/bash\n", "a text file, not a.*; name a file of weights"),
        )
    ]
    + [
        ("net.npz", b"PK\x03\x04" + bytes(60), "File is not a zip file"),  # cut
        ("net.onnx", b"\x08\x08\x12\x07pytorch", "not an ONNX model: no graph"),
    ],
)
def test_files_of_other_kinds_by_names_that_others_read(
    tmp_path: Path, name: str, content: bytes, found: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(elsa.FormatError, match=f"{name}: .*{found}"):
        elsa.pack(tmp_path / name, io.BytesIO(), sparsities=[50])


def test_a_directory(tmp_path: Path) -> None:
    for read in (elsa.open, elsa.verify, elsa.load_level):
        with pytest.raises(IsADirectoryError, match=r"holds no \.safetensors file"):
            read(tmp_path)
    (tmp_path / "net-00001-of-00001.safetensors").touch()
    (tmp_path / "net.safetensors.index.json").touch()
    with pytest.raises(IsADirectoryError, match=r"such as net\.safetensors\.index\.json"):
        elsa.pack(tmp_path, io.BytesIO(), sparsities=[50])
