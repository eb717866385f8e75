"""Model directories: packed, extracted, shipped into others that load, or not at all."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from internals import _atomic as atomic
from internals import _directory as directory
from internals import _pack as elsa_pack
from internals import main
from safetensors.numpy import load_file, save_file

import elsa_format as elsa
from elsa_format.plugins import weights_file

BIN = Path(sys.executable).parent
INDEX = "model.safetensors.index.json"
CONFIG = b'{"vocab_size": 100,\r\n "hidden_size": 16, "name": "\xc3\xa9"}'
SIDE = {
    "config.json": CONFIG,
    "tokenizer.model": bytes(range(256)) * 9,
    "Größe/日本.txt": "π".encode(),
    "empty": b"",
}
Network = dict[str, np.ndarray]


@pytest.fixture
def model() -> Network:
    """An embedding, a position, a norm, two layers (GPT-2's have their inputs first), a head."""
    rng = np.random.default_rng(1)

    def weight(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "embed_tokens.weight": weight(100, 16) * 1000,
        "wpe.weight": weight(32, 16),
        "h.0.ln_1.weight": weight(1, 16),
        "h.0.mlp.c_fc.weight": weight(16, 64),
        "h.0.mlp.c_fc.bias": weight(64),
        "h.0.odd.weight": weight(16, 20),
        "h.0.odd.bias": weight(16),
        "schicht.größe": weight(24, 16),
        "lm_head.weight": weight(100, 16),
    }


LAYERS = ("h.0.mlp.c_fc.weight", "h.0.odd.weight", "schicht.größe")


def fill(folder: Path) -> Path:
    for name, content in SIDE.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def single(model: Network, tmp_path: Path) -> Path:
    folder = fill(tmp_path / "dense 模型")
    save_file(model, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def save_shards(model: Network, folder: Path, variant: str = "") -> Path:
    fill(folder)
    names = list(model)
    weight_map = {}
    for number, own in enumerate((names[:3], names[3:]), 1):
        file = f"model{variant}-{number:05}-of-00002.safetensors"
        save_file({name: model[name] for name in own}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    about = {"total_parameters": 7, "note": {"é": [1, None]}}
    about["total_size"] = sum(array.nbytes for array in model.values())
    index = f"model.safetensors.index{variant}.json"
    (folder / index).write_text(json.dumps({"metadata": about, "weight_map": weight_map}))
    return folder


@pytest.fixture
def sharded(model: Network, tmp_path: Path) -> Path:
    return save_shards(model, tmp_path / "sharded")


@pytest.fixture
def packed(single: Path, tmp_path: Path) -> Path:
    elsa.pack(single, tmp_path / "packed", sparsities=[90, 50])
    return tmp_path / "packed"


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()}


def has_side_files(folder: Path) -> bool:
    return all((folder / name).read_bytes() == content for name, content in SIDE.items())


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(word) for word in words])
    return done.exit_code, done.stderr.strip()


# --- From a directory to a level in a directory --------------------------------------------------


def test_two_commands(single: Path, model: Network, tmp_path: Path) -> None:
    packed, level = tmp_path / "out", tmp_path / "a" / "b" / "level-1.5"
    code, summary = run("pack", single, "--sparsities", "90,50", "-o", packed)
    assert code == 0, summary
    assert "not nested (embedding): 1 tensor: embed_tokens.weight" in summary
    code, summary = run("extract", packed, "--level", 1, "-o", level)
    assert (code, f"{level}: level 1, " in summary) == (0, True)
    for folder in (packed, level):
        assert files(folder) == {*SIDE, "model.safetensors"}
        assert has_side_files(folder)
    found = load_file(level / "model.safetensors")
    assert found.keys() == model.keys()
    with elsa.open(packed) as file:
        assert set(file.nested) == set(LAYERS)
        for name, array in file.load(1).items():
            assert found[name].tobytes() == array.tobytes()
            if name not in LAYERS:
                assert array.tobytes() == model[name].tobytes()
    for name in LAYERS:  # the same share of each
        assert np.count_nonzero(found[name]) == round(model[name].size * 0.1)
    assert run("verify", level)[0] == run("verify", packed)[0] == run("inspect", packed)[0] == 0
    assert elsa.load_level(level).keys() == dict(elsa.stream(packed)).keys()


def test_what_is_left_out_and_why(single: Path, packed: Path, tmp_path: Path) -> None:
    report = elsa.pack(single, tmp_path / "again", sparsities=[90, 50])
    assert report.nested == tuple(sorted(LAYERS))
    left = {n: r for n, r in report.shared.items() if r != "1-dimensional"}
    assert left == {
        "embed_tokens.weight": "embedding",
        "wpe.weight": "position",
        "h.0.ln_1.weight": "vector",
        "lm_head.weight": "output head",
    }
    every = elsa.pack(single, tmp_path / "all", sparsities=[90], nest_all=True)
    assert set(every.nested) == {*LAYERS, *left}
    named = elsa.pack(single, tmp_path / "named", sparsities=[90], include="lm*")
    assert named.nested == ("lm_head.weight",)
    # A file is packed as ever: all of it, by one threshold.
    plain = elsa.pack(single / "model.safetensors", tmp_path / "x.safetensors", sparsities=[90])
    assert set(plain.nested) == {*LAYERS, *left}
    assert any("keeps no weight of 6 of 7 tensors" in note for note in plain.notes)
    assert not any("keeps no weight" in note for note in (*report.notes, *every.notes))
    with pytest.raises(elsa.InfeasibleLevels, match=r"left to nest; 'wpe.*: position"):
        elsa.pack(single, tmp_path / "none", sparsities=[90], exclude=LAYERS)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("words", "kind"), [(100, "output head"), (16, None), (48, None)])
def test_the_config_tells_the_vocabulary(
    words: int, kind: str | None, model: Network, tmp_path: Path
) -> None:
    """But not where it is as large as something else."""
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"x": model["embed_tokens.weight"], "y": model["h.0.odd.weight"]},
              folder / "model.safetensors")  # fmt: skip
    config = {"hidden_size": 16, "text_config": {"vocab_size": words}}
    (folder / "config.json").write_text(json.dumps(config))
    report = elsa.pack(folder, tmp_path / "out", sparsities=[50])
    assert report.shared.get("x") == kind
    (folder / "config.json").write_text("[" * 100_000)
    assert elsa.pack(folder, tmp_path / "out2", sparsities=[50]).nested == ("x", "y")


def test_patterns_lie_along_the_inputs(single: Path, tmp_path: Path) -> None:
    report = elsa.pack(single, tmp_path / "out", sparsities="1:8,2:4")
    assert report.nested == ("h.0.mlp.c_fc.weight", "schicht.größe")
    assert report.shared["h.0.odd.weight"] == "20 inputs, not a multiple of 8"
    with elsa.open(tmp_path / "out") as file:
        inputs_first = file.tensor("h.0.mlp.c_fc.weight", 1)  # its bias tells: 64 outputs
        assert set((inputs_first.reshape(2, 8, 64) != 0).sum(1).ravel()) == {1}
        inputs_last = file.tensor("schicht.größe", 1)
        assert set((inputs_last.reshape(24, 2, 8) != 0).sum(2).ravel()) == {1}
    report = elsa.pack(single, tmp_path / "axis", sparsities="1:8", axis=0)
    assert report.nested == ("h.0.mlp.c_fc.weight", "h.0.odd.weight", "schicht.größe")
    with pytest.raises(elsa.InfeasibleLevels, match="not a multiple of 7"):
        elsa.pack(single, tmp_path / "none", sparsities="1:7")


def test_levels_that_are_directories(single: Path, model: Network, tmp_path: Path) -> None:
    sparse = shutil.copytree(single, tmp_path / "sparse")
    some = {name: np.where(abs(a) > 0.5, a, 0) for name, a in model.items()}
    save_file(some, sparse / "model.safetensors")
    per_level = [name for name in model if model[name].ndim < 2]
    report = elsa.pack(single, tmp_path / "out", levels=[sparse], per_level=per_level)
    assert "embed_tokens.weight" in report.nested  # what is pruned was decided before
    assert (
        run("pack", single, "--level", sparse, "-o", tmp_path / "o", "--per-level", "*bias")[0] == 0
    )


# --- Names ---------------------------------------------------------------------------------------


def test_shards_keep_their_files_and_what_the_index_says(sharded: Path, tmp_path: Path) -> None:
    shards = {f"model-{n:05}-of-00002.safetensors" for n in (1, 2)}
    elsa.pack(sharded, tmp_path / "out", sparsities=[90, 50])
    elsa.extract(tmp_path / "out", tmp_path / "level", level=1)
    elsa.extract(tmp_path / "out", tmp_path / "both", level=1, keep_levels=True)
    elsa.ship(tmp_path / "out", tmp_path / "ship")
    elsa.extract(tmp_path / "ship", tmp_path / "whole", restore=True)
    for name in ("out", "level", "both", "whole"):
        folder = tmp_path / name
        assert files(folder) == {*SIDE, *shards, INDEX}
        about = json.loads((folder / INDEX).read_text())["metadata"]
        assert (about["total_parameters"], about["note"]) == (7, {"é": [1, None]})
        elsa.verify(folder)
    for name in (*shards, INDEX):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("exists", [False, True])
def test_the_whole_of_a_fetched_directory_is_a_directory(packed, tmp_path, exists) -> None:
    """With its side files, whether or not the directory exists; an error leaves nothing."""
    elsa.ship(packed, tmp_path / "ship")
    fetched, back = tmp_path / "fetched", tmp_path / "back"
    elsa.fetch(tmp_path / "ship", fetched, level=1)
    if exists:
        back.mkdir()
    assert run("extract", fetched, "--restore", "-o", back)[0] == 3
    assert not exists or not files(back)
    assert back.exists() == exists
    elsa.fetch(tmp_path / "ship", fetched, upgrade="dense")
    code, text = run("extract", fetched, "--restore", "-o", back)
    assert code == 0, text
    assert files(back) == files(packed)
    assert has_side_files(back)
    assert (back / "model.safetensors").read_bytes() == (packed / "model.safetensors").read_bytes()


def test_a_directory_in_shards_of_a_size(single: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("pack", single, "--sparsities", 50, "--max-shard-size", "5kB", "-o", out)[0] == 0
    assert (out / INDEX).exists()
    assert len(list(out.glob("model-*.safetensors"))) > 2
    elsa.extract(out, tmp_path / "one.safetensors", level=1)
    assert (tmp_path / "one.safetensors").is_file()


@pytest.mark.parametrize("layout", ["bitmask", "csr"])
def test_sparse_layouts_have_names_that_plain_loaders_refuse(
    layout: str, packed: Path, sharded: Path, tmp_path: Path
) -> None:
    elsa.extract(packed, tmp_path / "level", level=1, layout=layout)
    assert files(tmp_path / "level") == {*SIDE, f"model.{layout}.safetensors"}
    elsa.extract(tmp_path / "level", tmp_path / "dense again")
    elsa.extract(packed, tmp_path / "dense", level=1)
    for name in files(tmp_path / "dense"):
        one, other = (tmp_path / folder / name for folder in ("dense", "dense again"))
        assert one.read_bytes() == other.read_bytes()
    elsa.pack(sharded, tmp_path / "shards", sparsities=[90])
    elsa.extract(tmp_path / "shards", tmp_path / "sparse", level=1, layout=layout)
    found = files(tmp_path / "sparse") - set(SIDE)
    assert found == {
        f"model.safetensors.index.{layout}.json",
        f"model.{layout}-00001-of-00002.safetensors",
        f"model.{layout}-00002-of-00002.safetensors",
    }
    elsa.verify(tmp_path / "sparse")


def test_variants(model: Network, tmp_path: Path) -> None:
    folder = save_shards(model, tmp_path / "m", ".fp16")
    elsa.pack(folder, tmp_path / "out", sparsities=[90])
    assert files(tmp_path / "out") == files(folder)
    elsa.ship(tmp_path / "out", tmp_path / "ship")
    assert "model.ship.safetensors.index.fp16.json" in files(tmp_path / "ship")
    elsa.extract(tmp_path / "ship", tmp_path / "level", level=1)
    assert files(tmp_path / "level") == files(folder)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("model.safetensors model.fp16.safetensors", "model.safetensors"),
        ("model.fp16.safetensors", "model.fp16.safetensors"),
        ("diffusion_pytorch_model.safetensors x.safetensors",
         "diffusion_pytorch_model.safetensors"),
        ("model.fp16-00001-of-00001.safetensors model.safetensors.index.fp16.json",
         "model.safetensors.index.fp16.json"),
        ("model.fp16.safetensors model.bf16.safetensors", None),
        (f"model.safetensors {INDEX}", None),
        ("model.safetensors diffusion_pytorch_model.safetensors", None),
    ],
)  # fmt: skip
def test_which_file_is_meant(names: str, found: str | None, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.d" / "model.safetensors").mkdir(parents=True)
    for name in names.split():
        (tmp_path / name).touch()
    if found is not None:
        assert weights_file(tmp_path) == tmp_path / found
        return
    with pytest.raises(elsa.InvalidOption) as caught:
        elsa.open(tmp_path)
    assert all(name in str(caught.value) for name in names.split())


def test_folders_that_hold_weights_are_named(single: Path, tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    shutil.copytree(single, pipeline / "unet")
    (pipeline / "scheduler").mkdir()
    code, message = run("inspect", pipeline)
    assert code == 1
    assert message.endswith("holds no .safetensors file; its folders do: unet")


# --- Files and directories ------------------------------------------------------------------------


def test_a_directory_to_a_file_and_to_a_stream(packed: Path, tmp_path: Path) -> None:
    elsa.extract(packed, tmp_path / "level.safetensors", level=1)
    with open(tmp_path / "stream", "wb") as stream:
        elsa.extract(packed, stream, level=1)
    assert (tmp_path / "level.safetensors").read_bytes() == (tmp_path / "stream").read_bytes()
    assert run("extract", packed, "-l", 1, "-o", "/dev/null")[0] == 0


def test_a_file_is_not_written_to_a_directory(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        elsa.extract(packed / "model.safetensors", tmp_path / "folder", level=1, force=True)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        elsa.extract(packed, tmp_path / "file", level=1, force=True)


def test_a_download_cache(single: Path, sharded: Path, tmp_path: Path) -> None:
    """Its directories hold links; what is written holds none."""
    for folder in (single, sharded):
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / folder.name
        blobs.mkdir(exist_ok=True)
        for name in files(folder):
            blob = blobs / str(abs(hash((folder.name, name))))
            shutil.copy(folder / name, blob)
            blob.chmod(0o444)
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
        out = tmp_path / f"packed {folder.name}"
        elsa.pack(snapshot, out, sparsities=[90])
        assert files(out) == files(folder)
        assert has_side_files(out)
        for name in files(out):
            assert not (out / name).is_symlink()
            assert os.access(out / name, os.W_OK)
            assert (out / name).stat().st_mode & 0o200


def test_what_is_not_copied(single: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model.bin", "onnx/model.onnx", ".git/config", "tf_model.h5"):
        (single / name).parent.mkdir(exist_ok=True)
        (single / name).write_bytes(b"weights")
    (single / "onnx" / "config.json").write_bytes(b"{}")
    (single / "loop").symlink_to(single, target_is_directory=True)
    (single / "gone.json").symlink_to(tmp_path / "nowhere")
    os.mkfifo(single / "pipe")
    report = elsa.pack(single, single / "packed", sparsities=[90])
    assert files(single / "packed") == {*SIDE, "model.safetensors", "onnx/config.json"}
    left = "'pytorch_model.bin', 'tf_model.h5', 'onnx/model.onnx'"
    note = f"not copied, as they hold weights: {left}"
    assert note in report.notes
    # The directory that is written to is not copied into itself.
    elsa.pack(single, single / "packed", sparsities=[50], force=True)
    assert files(single / "packed") == {*SIDE, "model.safetensors", "onnx/config.json"}


def test_weights_of_other_modules_are_copied(single: Path, tmp_path: Path) -> None:
    """Those that sentence-transformers names."""
    modules = [{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}, {"path": ".."}]
    (single / "modules.json").write_text(json.dumps(modules))
    for name in ("2_Dense/model.safetensors", "checkpoint-5/model.safetensors", "old.bin"):
        (single / name).parent.mkdir(exist_ok=True)
        (single / name).write_bytes(b"weights")
    report = elsa.pack(single, tmp_path / "out", sparsities=[90])
    expected = {*SIDE, "model.safetensors", "modules.json", "2_Dense/model.safetensors"}
    assert files(tmp_path / "out") == expected
    assert report.notes[-1].endswith(": 'old.bin', 'checkpoint-5/model.safetensors'")
    for hostile in ("[1]", '{"path": 3}', "null", "[" * 100_000, '[{"path": [1]}]'):
        (single / "modules.json").write_text(hostile)
        elsa.pack(single, tmp_path / "out", sparsities=[90], force=True)


# --- What is there already, and failures ----------------------------------------------------------


def test_nothing_is_replaced_unless_asked_for(single: Path, packed: Path) -> None:
    before = (packed / "model.safetensors").read_bytes()
    (packed / "mine.txt").write_text("stays")
    (packed / "config.json").write_text("other")
    with pytest.raises(elsa.OutputExists, match=r"config\.json.*force"):
        elsa.pack(single, packed, sparsities=[70])
    (packed / "config.json").write_bytes(CONFIG)
    with pytest.raises(elsa.OutputExists, match=r"model\.safetensors.*force"):
        elsa.pack(single, packed, sparsities=[70])
    assert (packed / "model.safetensors").read_bytes() == before
    (packed / "config.json").write_text("other")
    elsa.pack(single, packed, sparsities=[70], force=True)
    assert has_side_files(packed)
    assert files(packed) == {*SIDE, "model.safetensors", "mine.txt"}


def test_packed_in_place(single: Path) -> None:
    elsa.pack(single, single, sparsities=[90], force=True)
    assert files(single) == {*SIDE, "model.safetensors"}
    assert elsa.verify(single).levels == 1


def test_weights_that_others_would_load_instead(packed: Path, sharded: Path) -> None:
    before = files(packed)
    with pytest.raises(elsa.OutputExists, match=r"model\.safetensors: is there already"):
        elsa.pack(sharded, packed, sparsities=[90], force=True)
    with pytest.raises(elsa.OutputExists, match=r"taken for model\.bitmask\.safetensors"):
        elsa.extract(packed, packed, level=1, layout="bitmask", force=True)
    assert files(packed) == before


@pytest.mark.parametrize("source", ["single", "sharded"])
@pytest.mark.parametrize("named", [True, False])
def test_a_failure_leaves_nothing(
    source: str,
    named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Whichever file cannot take its name, with temporary names or without."""
    folder = request.getfixturevalue(source)
    if named:
        monkeypatch.setattr(atomic, "_OPEN_FILES", "/nowhere")
    publish, left = atomic.AtomicFile.publish, 0

    def failing(self: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(28, "No space left on device", self.name)
        publish(self)

    monkeypatch.setattr(atomic.AtomicFile, "publish", failing)
    count = len(files(folder))
    for fails_at in range(count):
        left = fails_at
        with pytest.raises(OSError, match="No space left"):
            elsa.pack(folder, tmp_path / "new" / "out", sparsities=[90])
        assert not (tmp_path / "new").exists()
    left = count
    elsa.pack(folder, tmp_path / "new" / "out", sparsities=[90])
    assert len(files(tmp_path / "new" / "out")) == count


def test_bad_weights_and_side_files_leave_nothing(
    single: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(elsa.NoSuchLevel):
        elsa.extract(packed, out, level=9)
    with pytest.raises(elsa.NoSuchLevel):
        elsa.fetch(_shipped(packed, tmp_path), out, level=9)
    raw = bytearray((packed / "model.safetensors").read_bytes())
    raw[-40] ^= 1
    (packed / "model.safetensors").write_bytes(raw)
    with pytest.raises(elsa.ChecksumMismatch):
        elsa.extract(packed, out, level=1)

    def unreadable(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "config.json")

    monkeypatch.setattr(directory, "copy_file", unreadable)
    with pytest.raises(PermissionError):
        elsa.pack(single, out, sparsities=[90])
    assert not out.exists()


def test_places_that_may_not_be_written_or_read(single: Path) -> None:
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shutil.copytree(single, folder / "dense")
        (folder / "dense" / "model.safetensors").chmod(0o644)
        (folder / "dense" / "empty").chmod(0o000)
        folder.chmod(0o777)
        (folder / "closed").mkdir(mode=0o555)
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError, match="empty"):
                elsa.pack(folder / "dense", folder / "out", sparsities=[90])
            with pytest.raises(PermissionError, match="closed"):
                elsa.pack(folder / "dense", folder / "closed" / "out", sparsities=[90])
        finally:
            if root:
                os.seteuid(0)
        assert {path.name for path in folder.iterdir()} == {"dense", "closed"}
        assert not list((folder / "closed").iterdir())


@pytest.mark.parametrize("fails", [True, False])
def test_more_files_than_a_process_may_open(
    fails: bool, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "OPEN", 2)
    for number in range(9):
        (single / f"{number}.txt").write_text(str(number))
    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(elsa_pack._Job, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            elsa.pack(single, tmp_path / "out", sparsities=[90])
    if fails:
        assert not (tmp_path / "out").exists()
    else:
        assert files(tmp_path / "out") == files(single)
        for number in range(9):
            assert (tmp_path / "out" / f"{number}.txt").read_text() == str(number)


@pytest.mark.skipif(sys.platform != "linux", reason="names that are not UTF-8")
def test_names_that_are_not_text(single: Path, tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\n.json")
    (single / name).write_bytes(b"side")
    (single / f"{name}.bin").write_bytes(b"weights")
    code, summary = run("pack", single, "--sparsities", 90, "-o", tmp_path / "out")
    assert (code, "\n.json" in summary) == (0, False)
    assert (tmp_path / "out" / name).read_bytes() == b"side"


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_nothing(number: int, tmp_path: Path) -> None:
    folder = fill(tmp_path / "m")
    rng = np.random.default_rng(0)
    save_file({"w": rng.standard_normal((3000, 3000))}, folder / "model.safetensors")
    out = tmp_path / "new" / "out"
    words = [BIN / "elsa-pack", folder, "--sparsities", "99,90,80,70,60,50", "-o", out]
    process = subprocess.Popen(
        [str(word) for word in words],
        stderr=subprocess.PIPE,
    )
    for _ in range(2000):
        if out.exists() or process.poll() is not None:
            break
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    assert not (tmp_path / "new").exists()


# --- Delivery -------------------------------------------------------------------------------------


def _shipped(packed: Path, tmp_path: Path) -> Path:
    elsa.ship(packed, tmp_path / "ship")
    return tmp_path / "ship"


@pytest.mark.parametrize("source", ["single", "sharded"])
def test_ship_and_fetch(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    elsa.pack(request.getfixturevalue(source), tmp_path / "packed", sparsities=[90, 50])
    ship, phone = _shipped(tmp_path / "packed", tmp_path), tmp_path / "phone"
    assert has_side_files(ship)
    with pytest.raises(elsa.InvalidOption, match="does not exist"):
        elsa.fetch(ship, phone, upgrade=2)
    assert run("fetch", ship, "--level", 1, "-o", phone)[0] == 0
    assert files(phone) == files(ship)
    assert has_side_files(phone)
    for level in (1, 2):
        elsa.fetch(ship, phone, level=level)
        elsa.extract(phone, tmp_path / f"from phone {level}", level=level)
        elsa.extract(tmp_path / "packed", tmp_path / f"level {level}", level=level)
        for name in files(tmp_path / f"level {level}"):
            one, two = (tmp_path / f"{a} {level}" / name for a in ("from phone", "level"))
            assert one.read_bytes() == two.read_bytes()
    split = tmp_path / "split"
    elsa.ship(tmp_path / "packed", split, split=True)
    assert has_side_files(split)
