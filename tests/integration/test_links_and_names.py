"""Names that lead nowhere: links in a circle, names longer than a file may have."""

import errno
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from internals import main

import elsa_format as elsa

LONG = "n" * 5000
Use = Callable[[Path], object]


def run(*words: object) -> tuple[int, str]:
    """A command's exit code and its one line of complaint."""
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.exit_code, done.stderr


def circle(folder: Path, *names: str) -> Path:
    """Links of which each leads to the next, and the last to the first."""
    for name, target in zip(names, (*names[1:], names[0]), strict=True):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)
    return folder / names[0]


READ: dict[str, Use] = {
    "open": elsa.open,
    "verify": elsa.verify,
    "stream": lambda path: dict(elsa.stream(path)),
    "extract": lambda path: elsa.extract(path, io.BytesIO(), level=1),
    "pack": lambda path: elsa.pack(path, io.BytesIO(), sparsities=[50]),
    "load_level": elsa.load_level,
}
read = pytest.mark.parametrize("use", READ.values(), ids=READ)


@pytest.fixture
def index(network: dict[str, np.ndarray], tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors.index.json"
    elsa.pack(network, path, sparsities=[95, 90], max_shard_size=1000)
    return path


@read
@pytest.mark.parametrize("others", [(), ("b",), ("b", "c")])
def test_a_shard_that_is_a_circle(use: Use, others: tuple[str, ...], index: Path) -> None:
    first = sorted(index.parent.glob("*.safetensors"))[0].name
    circle(index.parent, first, *others)
    with pytest.raises(elsa.InvalidIndex, match=f"shard {first!r} does not exist"):
        use(index)


def test_a_shard_by_way_of_a_circle(index: Path) -> None:
    """A link that leads to a circle, and one that leads through a circle out of the directory."""
    first = sorted(index.parent.glob("*.safetensors"))[0]
    circle(index.parent, "a", "b")
    for target in ("a", "a/x", "a/../../x"):
        first.unlink()
        first.symlink_to(target)
        with pytest.raises((elsa.InvalidIndex, elsa.UnsafePath), match=re.escape(first.name)):
            elsa.open(index)
        assert run("verify", index)[0] == 3


@read
@pytest.mark.parametrize("suffix", ["safetensors", "safetensors.index.json"])
def test_a_source_that_is_a_circle(use: Use, suffix: str, tmp_path: Path) -> None:
    path = circle(tmp_path, f"a.{suffix}", f"b.{suffix}")
    with pytest.raises(OSError, match=re.escape(path.name)) as caught:
        use(path)
    assert caught.value.errno == errno.ELOOP


@pytest.mark.parametrize("suffix", ["safetensors", "npz", "onnx", "safetensors.index.json"])
@pytest.mark.parametrize("words", [["pack", "--sparsities", 50], ["extract", "-l", 1]])
def test_commands_that_read_or_write_a_circle(
    suffix: str, words: list[object], packed: Path, tmp_path: Path
) -> None:
    path = circle(tmp_path, f"a.{suffix}", f"b.{suffix}")
    expected = (1, f"error: {path}: {os.strerror(errno.ELOOP)}\n")
    assert run(words[0], path, *words[1:], "-o", tmp_path / "out.safetensors") == expected
    if words[0] == "pack":
        return
    for force in ([], ["--force"]):
        code, message = run(words[0], packed, *words[1:], "-o", path, *force)
        assert (code, path.is_symlink()) == (1, True)
        assert message.startswith(f"error: {path}: ")


@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_is_a_circle(packed: Path, force: bool, tmp_path: Path) -> None:
    path = circle(tmp_path, "a", "b")
    with pytest.raises(OSError, match="a") as caught:
        elsa.extract(packed, path, level=1, force=force)
    assert caught.value.errno == errno.ELOOP
    assert path.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["a", "b", packed.name]


@read
def test_names_longer_than_names_may_be(use: Use, index: Path, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="File name too long"):
        use(tmp_path / f"{LONG}.safetensors")
    for name in (LONG, "é" * 200, "x" * 256):
        changed = json.loads(index.read_text())
        changed["weight_map"] = dict.fromkeys(changed["weight_map"], name)
        index.write_text(json.dumps(changed))
        with pytest.raises(elsa.InvalidIndex, match="does not exist"):
            use(index)


def test_an_output_with_a_name_longer_than_names_may_be(packed: Path, tmp_path: Path) -> None:
    for suffix in ("safetensors", "safetensors.index.json"):
        out = tmp_path / f"{LONG}.{suffix}"
        for force in (False, True):
            with pytest.raises(OSError, match="File name too long"):
                elsa.extract(packed, out, level=1, force=force)
        assert run("extract", packed, "-l", 1, "-o", out)[0] == 1
    assert os.listdir(tmp_path) == [packed.name]


@pytest.mark.parametrize("name", ["a\0b", "\0", "..\0"])
def test_a_shard_with_a_null_in_its_name(name: str, index: Path) -> None:
    changed = json.loads(index.read_text())
    changed["weight_map"] = dict.fromkeys(changed["weight_map"], name)
    index.write_text(json.dumps(changed))
    with pytest.raises(elsa.UnsafePath, match=r"\\x00"):
        elsa.open(index)
