"""Outputs appear whole or not at all."""

import io
import os
from pathlib import Path

import pytest

import elsa_format as elsa
from elsa_format import _output
from elsa_format._output import AtomicFile, open_output


@pytest.fixture(params=["unnamed", "named"])
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to hold a file that is not complete."""
    if request.param == "named":
        monkeypatch.setattr(_output, "_OPEN_FILES", "/nowhere")
    return str(request.param)


def test_nothing_is_there_before_the_commit(tmp_path: Path, temporary: str) -> None:
    with open_output(tmp_path / "out") as output:
        output.write_at(0, b"abc")
        assert not (tmp_path / "out").exists()
        assert len(list(tmp_path.iterdir())) == (temporary == "named")
        output.commit()
    assert (tmp_path / "out").read_bytes() == b"abc"
    assert os.listdir(tmp_path) == ["out"]


def test_without_a_commit_nothing_is_left(tmp_path: Path, temporary: str) -> None:
    (tmp_path / "out").write_text("old")
    with open_output(tmp_path / "out", force=True) as output:
        output.write_at(0, b"abc")
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "old"


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path, temporary: str) -> None:
    (tmp_path / "out").write_text("old")
    with pytest.raises(elsa.OutputExists, match="exists already; force=True replaces it"):
        AtomicFile(tmp_path / "out")
    with open_output(tmp_path / "out", force=True) as output:
        output.write_at(0, b"new")
        output.commit()
    assert (tmp_path / "out").read_text() == "new"
    assert os.listdir(tmp_path) == ["out"]


def test_who_comes_second_does_not_replace_the_first(tmp_path: Path, temporary: str) -> None:
    first, second = AtomicFile(tmp_path / "out"), AtomicFile(tmp_path / "out")
    first.write_at(0, b"first")
    second.write_at(0, b"second")
    first.commit()
    with pytest.raises(elsa.OutputExists):
        second.commit()
    second.discard()
    assert (tmp_path / "out").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["out"]


def test_a_symbolic_link_stays_one(tmp_path: Path, temporary: str) -> None:
    (tmp_path / "target").write_text("old")
    (tmp_path / "link").symlink_to("target")
    with open_output(tmp_path / "link", force=True) as output:
        output.write_at(0, b"new")
        output.commit()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "new"


def test_the_file_has_ordinary_permissions(tmp_path: Path, temporary: str) -> None:
    umask = os.umask(0o022)
    try:
        with open_output(tmp_path / "out") as output:
            output.commit()
    finally:
        os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o644


def test_a_stream_gets_ordered_writes_at_once_and_others_at_the_end() -> None:
    direct, spooled = io.BytesIO(), io.BytesIO()
    with open_output(direct, in_order=True) as output:
        output.write_at(0, b"ab")
        assert direct.getvalue() == b"ab"
        with pytest.raises(ValueError, match="cannot write at 5"):
            output.write_at(5, b"x")
    with open_output(spooled) as output:
        output.write_at(2, b"cd")
        output.write_at(0, b"ab")
        assert spooled.getvalue() == b""
        output.commit()
    assert spooled.getvalue() == b"abcd"
