"""Outputs appear whole or not at all."""

import contextlib
import errno
import io
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import windows
from internals import AtomicFile, Transaction, open_output
from internals import _atomic as atomic

import elsa_format as elsa
from elsa_format.plugins import commit_outputs


def no_links(*arguments: Any, **options: Any) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture(params=["unnamed", "named", "FAT", "Android", "Windows", "Windows and FAT"])
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way to hold a file that is not complete, and to give it its name."""
    if request.param in ("named", "FAT"):
        monkeypatch.setattr(atomic, "_OPEN_FILES", "/nowhere")
    if "Windows" in request.param:
        windows.imitate(monkeypatch)
    if "FAT" in request.param:
        monkeypatch.setattr(os, "link", no_links)
    if request.param == "Android":
        monkeypatch.delattr(os, "link")
    return str(request.param)


def test_nothing_is_there_before_the_commit(tmp_path: Path, temporary: str) -> None:
    with open_output(tmp_path / "out") as output:
        output.write_at(0, b"abc")
        assert not (tmp_path / "out").exists()
        assert len(list(tmp_path.iterdir())) == (temporary != "unnamed")
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


def test_bytes_are_written_as_they_are(tmp_path: Path, temporary: str) -> None:
    """Line ends, too, and at any position, from several threads."""
    content = np.random.default_rng(0).integers(8, 15, 1 << 18, np.uint8).tobytes()
    with open_output(tmp_path / "out") as output:

        def write(start: int) -> None:
            for at in range(start, len(content), 4096):
                output.write_at(at, content[at : at + 1024])

        threads = [threading.Thread(target=write, args=(1024 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        output.commit()
    assert (tmp_path / "out").read_bytes() == content


def test_a_failed_rename_leaves_nothing(
    tmp_path: Path, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when another program on Windows has the old output open."""

    def refused(source: Any, target: Any, **options: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", source)

    (tmp_path / "out").write_text("old")
    monkeypatch.setattr(os, "replace", refused)
    with (
        open_output(tmp_path / "out", force=True) as output,
        pytest.raises(PermissionError, match=r"out'$"),
    ):
        output.commit()
    assert os.listdir(tmp_path) == ["out"]
    assert (tmp_path / "out").read_text() == "old"


def test_interruption_leaves_nothing(
    tmp_path: Path, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just before the file gets its name."""

    def interrupted(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    for call in ("fsync", "link", "rename"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, interrupted, raising=False)
            with contextlib.suppress(KeyboardInterrupt), open_output(tmp_path / "out") as output:
                output.write_at(0, b"new")
                output.commit()
        assert os.listdir(tmp_path) in ([], ["out"])
        (tmp_path / "out").unlink(missing_ok=True)


@pytest.mark.parametrize("fails_at", range(4))
def test_outputs_of_a_transaction_appear_in_order_or_not_at_all(
    tmp_path: Path, temporary: str, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """The index is the last, though it was opened first; what has appeared goes again."""
    appeared: list[str] = []
    publish = AtomicFile.publish

    def failing(self: Any) -> None:
        if len(appeared) == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device", self.name)
        publish(self)
        appeared.append(os.path.basename(self.name))

    monkeypatch.setattr(AtomicFile, "publish", failing)
    whole = fails_at == 3
    with (
        Transaction() as transaction,
        contextlib.nullcontext() if whole else pytest.raises(OSError, match="No space left"),
    ):
        transaction.open_index(tmp_path / "index").write_at(0, b"ab")
        for name in ("b", "a"):
            transaction.open(tmp_path / name).write_at(0, name.encode())
        assert not (tmp_path / "index").exists()
        transaction.commit()
    assert appeared == ["b", "a", "index"][:fails_at]
    assert sorted(os.listdir(tmp_path)) == (["a", "b", "index"] if whole else [])


def test_a_transaction_without_a_commit_leaves_nothing(tmp_path: Path, temporary: str) -> None:
    with Transaction() as transaction:
        transaction.make_folder(tmp_path / "new" / "folder" / "a")
        transaction.open(tmp_path / "new" / "folder" / "a").write_at(0, b"a")
    assert os.listdir(tmp_path) == []


def test_an_old_index_goes_before_what_it_names(
    tmp_path: Path, temporary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("index", "shard"):
        (tmp_path / name).write_text("old")
    monkeypatch.setattr(AtomicFile, "publish", no_links)
    with Transaction(force=True) as transaction:
        transaction.open_index(tmp_path / "index")
        transaction.open(tmp_path / "shard")
        with pytest.raises(PermissionError):
            transaction.commit()
    assert os.listdir(tmp_path) == ["shard"]
    assert (tmp_path / "shard").read_text() == "old"


def test_commit_outputs_of_earlier_releases_works(tmp_path: Path) -> None:
    with (
        open_output(tmp_path / "a") as first,
        open_output(tmp_path / "b") as second,
        pytest.warns(DeprecationWarning, match=r"commit_outputs is now Transaction\.commit"),
    ):
        commit_outputs([first, second])
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
