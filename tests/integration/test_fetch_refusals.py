"""What elsa-fetch refuses, in one line and before anything is written; and what it says."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from faulty_server import Server, cut_after, status
from internals import find_command

import elsa_format as elsa

SHIP, INDEX = "model.ship.safetensors", "model.ship.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00002.ship.safetensors" for i in (1, 2)]


def ship(folder: Path, seed: int = 1, sparsities: tuple[int, ...] = (90, 50), **more: Any) -> Path:
    """A model directory of some 100 kB, shipped."""
    rng = np.random.default_rng(seed)
    weights = {f"w{i}": rng.standard_normal((200, 64)).astype(np.float32) for i in (0, 1)}
    name = "model.safetensors.index.json" if more else "model.safetensors"
    (folder / "packed").mkdir(parents=True)
    elsa.pack(weights, folder / "packed" / name, sparsities=list(sparsities), **more)
    (folder / "packed" / "config.json").write_text("{}")
    elsa.ship(folder / "packed", folder / "ship")
    return folder / "ship"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ship(tmp_path_factory.mktemp("single"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ship(tmp_path_factory.mktemp("sharded"), max_shard_size=60_000)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def serve(server: Server, folder: Path, under: str = "", **options: Any) -> str:
    for name, raw in content(folder).items():
        server.serve(raw, f"{under}/{name}", **options)
    return f"{server.url}{under}"


# --- The source itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("way", ["path", "symbolic link", "hard link", "file URL", "both"])
def test_onto_its_own_source(
    single: Path, tmp_path: Path, way: str, damaged: bool, force: bool
) -> None:
    """It was cut to its first good bytes."""
    raw = bytearray((single / SHIP).read_bytes())
    raw[700] ^= damaged
    source = tmp_path / "net.ship.safetensors"
    source.write_bytes(raw)
    given, out = str(source), str(source)
    if way == "symbolic link":
        out = str(tmp_path / "link")
        os.symlink(source, out)
    elif way == "hard link":
        out = str(tmp_path / "link")
        os.link(source, out)
    elif way == "file URL":
        given = source.as_uri()
    elif way == "both":
        given, out = source.as_uri(), source.as_uri()
    for wish in ({"level": 1}, {"upgrade": "dense"}):
        with pytest.raises(elsa.InvalidOption, match="is a file of the source; write to another"):
            elsa.fetch(given, out, force=force, **wish)
    assert source.read_bytes() == raw


def test_onto_its_own_index_and_directory(sharded: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    shutil.copytree(sharded, here)
    damaged = bytearray((here / SHARDS[1]).read_bytes())
    damaged[-9] ^= 1
    (here / SHARDS[1]).write_bytes(damaged)
    before = content(here)
    os.symlink(here, tmp_path / "link")
    for source, out in (
        (here, here),
        (here, tmp_path / "link"),
        (here / INDEX, tmp_path / "link" / INDEX),
        (here / INDEX, here / "other.index.json"),
    ):
        with pytest.raises(elsa.InvalidOption, match="is a file of the source"):
            elsa.fetch(source, out, level="dense", force=True)
        assert content(here) == before
    # One shard or side file that is the same file is enough.
    for name in (SHARDS[1], "config.json", "elsa-files.json"):
        out = tmp_path / f"out {name}"
        out.mkdir()
        os.link(here / name, out / name)
        with pytest.raises(elsa.InvalidOption, match="is a file of the source"):
            elsa.fetch(here, out, level=1, force=True)
        assert content(out) == {name: before[name]}


def test_a_served_source_is_not_cut(server: Server, single: Path, tmp_path: Path) -> None:
    """Where nobody can tell that it is the same file: damage on both sides changes no length."""
    raw = bytearray((single / SHIP).read_bytes())
    raw[-9] ^= 1
    out = tmp_path / "out"
    out.write_bytes(raw)
    with pytest.raises(elsa.ChecksumMismatch):
        elsa.fetch(server.serve(bytes(raw)), out, level="dense")
    assert out.read_bytes() == raw


def test_damage_is_mended_in_place(server: Server, single: Path, tmp_path: Path) -> None:
    """A level of a longer file costs nothing of what follows it."""
    raw, out = (single / SHIP).read_bytes(), tmp_path / "out"
    header = 8 + int.from_bytes(raw[:8], "little")
    for at in (header + 5, 2000):  # the head; part 1
        damaged = bytearray(raw)
        damaged[at] ^= 1
        out.write_bytes(damaged)
        report = elsa.fetch(server.serve(raw), out, level=1)
        assert out.read_bytes() == raw
        assert (report.level, report.available) == (1, "dense")
        assert report.fetched < len(raw) / 2


# --- Shards that do not fit -----------------------------------------------------------------------


def _other_version(folder: Path, tmp_path: Path) -> None:
    other = ship(tmp_path / "other", seed=2, max_shard_size=60_000)
    shutil.copy(other / SHARDS[1], folder)


def _fewer_levels(folder: Path, tmp_path: Path) -> None:
    other = ship(tmp_path / "other", sparsities=(90,), max_shard_size=60_000)
    shutil.copy(other / SHARDS[1], folder)


def _wrong_map(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / INDEX).read_bytes())
    index["weight_map"] = dict(zip(index["weight_map"], SHARDS[::-1], strict=True))
    (folder / INDEX).write_text(json.dumps(index))


def _wrong_size(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / INDEX).read_bytes())
    index["metadata"]["total_size"] += 1
    (folder / INDEX).write_text(json.dumps(index))


def _no_delivery_file(folder: Path, tmp_path: Path) -> None:
    name = SHARDS[1].replace(".ship", "")
    shutil.copy(folder.parent / "packed" / name, folder / SHARDS[1])


def _missing(folder: Path, tmp_path: Path) -> None:
    (folder / SHARDS[1]).unlink()


def _trailing(folder: Path, tmp_path: Path) -> None:
    (folder / SHARDS[1]).write_bytes((folder / SHARDS[1]).read_bytes() + b"x")


MISFITS: dict[str, tuple[Callable[[Path, Path], None], type[elsa.ElsaError]]] = {
    "another version": (_other_version, elsa.InvalidIndex),
    "fewer levels": (_fewer_levels, elsa.InvalidIndex),
    "a wrong map": (_wrong_map, elsa.InvalidIndex),
    "a wrong size": (_wrong_size, elsa.InvalidIndex),
    "no delivery file": (_no_delivery_file, elsa.InvalidIndex),
    "missing": (_missing, elsa.InvalidIndex),
    "trailing bytes": (_trailing, elsa.TrailingData),
}


@pytest.mark.parametrize("remote", [False, True], ids=["path", "URL"])
@pytest.mark.parametrize("case", MISFITS)
def test_shards_that_do_not_fit(
    server: Server, sharded: Path, tmp_path: Path, case: str, remote: bool
) -> None:
    """They exit with the error of `open`, and leave nothing, or what there was."""
    change, error = MISFITS[case]
    shutil.copytree(sharded.parent, tmp_path / "copy")
    folder = tmp_path / "copy" / "ship"
    change(folder, tmp_path)
    with pytest.raises(error):
        elsa.open(folder)
    if remote and case == "missing":
        error = elsa.RemoteError
    url = serve(server, folder)
    for source in (f"{url}/", f"{url}/{INDEX}") if remote else (folder, folder / INDEX):
        into = str(source).endswith(("/", "ship"))
        out = tmp_path / "out"
        for wish in (1, "dense"):
            out.mkdir(exist_ok=True)
            with pytest.raises(error):
                elsa.fetch(source, out if into else out / INDEX, level=wish)
            assert content(out) == {}
        elsa.fetch(sharded, out, level=1)
        before = content(out)
        with pytest.raises((error, elsa.OutputExists)):
            elsa.fetch(source, out if into else out / INDEX, upgrade=2)
        assert content(out) == before
        shutil.rmtree(out)


# --- Links, and what follows the last byte --------------------------------------------------------


@pytest.mark.parametrize("name", [INDEX, *SHARDS, "config.json", "elsa-files.json"])
@pytest.mark.parametrize("dangling", [False, True])
def test_links_that_leave_the_directory(
    sharded: Path, tmp_path: Path, name: str, dangling: bool
) -> None:
    """ELSA-D-046: of weights and shards, too."""
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    elsewhere.mkdir()
    if not dangling:
        shutil.copy(sharded / name, elsewhere)
    os.symlink(elsewhere / name, out / name)
    before = content(elsewhere)
    for force in (False, True):
        with pytest.raises(elsa.UnsafePath, match="leaves the directory"):
            elsa.fetch(sharded, out, level=1, force=force)
    assert [path.name for path in out.iterdir()] == [name]
    assert content(elsewhere) == before


def test_links_within_the_directory(single: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "blobs").mkdir(parents=True)
    os.symlink(out / "blobs" / "weights", out / SHIP)
    elsa.fetch(single, out, level="dense")
    assert (out / "blobs" / "weights").read_bytes() == (single / SHIP).read_bytes()


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize("ranges", [True, False])
def test_trailing_bytes(
    server: Server, single: Path, tmp_path: Path, length: bool, ranges: bool
) -> None:
    """Refused as `open` does: before anything, where the length is known, else at the end."""
    raw, out = (single / SHIP).read_bytes() + b"x", tmp_path / "out"
    url = server.serve(raw, length=length, ranges=ranges, etag=None)
    known = length or ranges
    for level in (1, "dense"):
        if level == "dense" or known:
            with pytest.raises(elsa.TrailingData):
                elsa.fetch(url, out, level=level)
    (tmp_path / "local").write_bytes(raw)
    with pytest.raises(elsa.TrailingData):
        elsa.fetch(tmp_path / "local", tmp_path / "copy", level=1)
    assert not (tmp_path / "copy").exists()
    assert out.exists() != known


def test_a_first_part_that_is_wrong_leaves_nothing(
    server: Server, single: Path, tmp_path: Path
) -> None:
    raw = bytearray((single / SHIP).read_bytes())
    raw[2000] ^= 1
    with pytest.raises(elsa.ChecksumMismatch, match=r"^http"):
        elsa.fetch(server.serve(bytes(raw)), tmp_path / "out", level=1)
    assert not list(tmp_path.iterdir())


def test_a_side_file_that_is_missing_leaves_no_weights(
    server: Server, single: Path, tmp_path: Path
) -> None:
    url, out = serve(server, single), tmp_path / "out"
    del server.files["/config.json"]
    with pytest.raises(elsa.RemoteError, match="404"):
        elsa.fetch(f"{url}/", out, level=1)
    assert not out.exists()


def test_force_replaces_nothing_by_what_is_refused(single: Path, tmp_path: Path) -> None:
    """Neither the wrong level, nor a prefix that ends too early, costs the file that is there."""
    raw, out, short = (single / SHIP).read_bytes(), tmp_path / "out", tmp_path / "short"
    short.write_bytes(raw[:1500])
    out.write_bytes(b"another network")
    with pytest.raises(elsa.NoSuchLevel):
        elsa.fetch(single / SHIP, out, level=9, force=True)
    with pytest.raises(elsa.Incomplete):
        elsa.fetch(short, out, level=1, force=True)
    assert out.read_bytes() == b"another network"
    elsa.fetch(single / SHIP, out, level="dense", force=True)
    assert out.read_bytes() == raw


# --- What is parsed, transferred and said ---------------------------------------------------------


def test_headers_are_parsed_once(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not once for each level."""
    from internals import _document as document
    from internals import _header as header
    from internals import _prefix as prefix
    from internals import _profile as profile

    calls = dict.fromkeys(("header", "profile", "document"), 0)

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    parse = counted("header", header.parse)
    for module, name in ((header, "parse"), (prefix, "parse_header")):
        monkeypatch.setattr(module, name, parse)
    monkeypatch.setattr(profile, "parse", counted("profile", profile.parse))
    monkeypatch.setattr(document, "parse_document", counted("document", document.parse_document))
    elsa.fetch(single / SHIP, tmp_path / "out", level=1)
    once = dict(calls)
    assert (once["header"], once["profile"]) == (2, 1)  # the file's own header, and the source's
    for wish in ("dense", "dense"):
        calls.update(dict.fromkeys(calls, 0))
        elsa.fetch(single / SHIP, tmp_path / "out", level=wish)
        assert calls == once


def test_a_url_without_its_slash(server: Server, single: Path, tmp_path: Path) -> None:
    url = serve(server, single, "/models/gpt2")
    page = b"<!doctype html><title>Directory listing for /models/gpt2/</title>"
    for number, faults in enumerate(
        ([], [status(403)], [status(301, Location="/models/gpt2/")]),
    ):
        server.files.pop("/models/gpt2", None)
        server.files.pop("/models/gpt2/", None)
        if faults:
            server.serve(b"", "/models/gpt2", faults=faults * 9)
            server.serve(page, "/models/gpt2/")
        out = tmp_path / f"out{number}"
        elsa.fetch(url, out, level="dense")
        assert content(out) == content(single)
    # Where there is no manifest, the URL is that of a file, whatever its name.
    raw = (single / SHIP).read_bytes()
    elsa.fetch(server.serve(raw, "/download"), tmp_path / "file", level="dense")
    assert (tmp_path / "file").read_bytes() == raw
    server.serve(page, "/app/elsa-files.json")  # and where every page is answered
    elsa.fetch(server.serve(raw, "/app"), tmp_path / "app", level="dense")
    assert (tmp_path / "app").read_bytes() == raw
    with pytest.raises(elsa.RemoteError, match="/nothing: the server answered 404") as caught:
        elsa.fetch(f"{server.url}/nothing", tmp_path / "none", level=1)
    assert caught.value.status == 404


@pytest.mark.parametrize("length", [True, False])
def test_without_ranges_the_first_answer_is_read_on(
    server: Server, tmp_path: Path, length: bool
) -> None:
    rng = np.random.default_rng(5)
    elsa.pack({"w": rng.standard_normal((700, 400))}, tmp_path / "net", sparsities=[95, 50])
    elsa.ship(tmp_path / "net", tmp_path / SHIP)
    raw, out = (tmp_path / SHIP).read_bytes(), tmp_path / "out"
    url = server.serve(raw, ranges=False, length=length)
    first = elsa.fetch(url, out, level=2)
    assert len(server.requests) == 1
    assert first.fetched == first.size > 256 << 10
    # For an upgrade all comes again, which is told, and counts for a budget.
    assert elsa.fetch(url, out, max_size=len(raw) - 1).available == 2
    assert out.stat().st_size == first.size
    server.requests.clear()
    more = elsa.fetch(url, out, upgrade="dense")
    assert out.read_bytes() == raw
    assert len(server.requests) == 1
    assert more.fetched == len(raw)
    with elsa.open(url) as file:
        assert file.load("dense")["w"].size == 280_000
    assert len(server.requests) == 2


def test_an_answer_that_ended_while_it_waited(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers drop connections on which nothing is read: that is no failure, and asked for anew."""
    monkeypatch.setenv("ELSA_RETRIES", "0")
    elsa.pack(
        {"w": np.random.default_rng(5).standard_normal((300, 99))},
        tmp_path / "net",
        sparsities=[50],
    )
    raw = (tmp_path / "net").read_bytes()
    url = server.serve(raw, ranges=False, faults=[cut_after(100_000)])
    with elsa.open(url) as file:
        assert file.load("dense")["w"].size == 29_700
    assert len(server.requests) == 2
    url = server.serve(raw, ranges=False, faults=[cut_after(100_000)] * 2)
    with elsa.open(url) as file, pytest.raises(elsa.RemoteError, match="broke at byte 100000"):
        file.load("dense")


def test_what_the_command_says(single: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    command, source = find_command("fetch"), str(single / SHIP)
    assert command is not None

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(command, [*words])
        return done.exit_code, done.output

    assert run(source, "--level", "2", "-o", "out")[1].startswith("out: level 2, ")
    code, said = run(source, "--upgrade", "1", "-o", "out")
    assert (code, said.startswith("out: level 2, ")) == (0, True)
    assert said.endswith("downloaded now; level 1 was part of it already\n")
    told = json.loads(run(source, "--upgrade", "1", "-o", "out", "--json")[1])
    assert (told["level"], told["available"]) == (1, 2)
    code, said = run(source, "--level", "9", "-o", "out")
    assert (code, said.startswith(f"error: {source}: no level '9'")) == (2, True)
    for words in ((source, "-o", "-"), ("-", "-o", "other")):
        code, said = run(*words, "--level", "1")
        assert (code, "name a file." in said) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
