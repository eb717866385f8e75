"""Stores that fsspec knows: read by ranges, written whole or not at all. S3 is a real server."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from internals import import_line

pytest.importorskip("moto")
pytest.importorskip("s3fs")

from s3_server import PART, Asked, Server, cut, s3_server

import elsa_format as elsa
from elsa_format.cli import install_command

BIN = Path(sys.executable).parent
BUCKET = "s3://bucket"


class Bucket:
    """What is in the server's bucket, as another client sees it."""

    def __init__(self, server: Server) -> None:
        import boto3

        self.server = server
        self.client = boto3.client(
            "s3",
            endpoint_url=server.url,
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )

    @property
    def names(self) -> list[str]:
        found = self.client.list_objects_v2(Bucket="bucket").get("Contents", [])
        return [each["Key"] for each in found]

    @property
    def uploads(self) -> list[str]:
        """Those that are under way, or were left."""
        found = self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
        return [each["Key"] for each in found]

    def read(self, name: str) -> bytes:
        return self.client.get_object(Bucket="bucket", Key=name)["Body"].read()

    def put(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket="bucket", Key=name, Body=content)

    def clear(self) -> None:
        for name in self.names:
            self.client.delete_object(Bucket="bucket", Key=name)
        uploads = self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
        for each in uploads:
            self.client.abort_multipart_upload(
                Bucket="bucket", Key=each["Key"], UploadId=each["UploadId"]
            )


@pytest.fixture(scope="module")
def running() -> Iterator[Server]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        import fsspec.config

        patch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART})
        yield server


@pytest.fixture
def bucket(running: Server) -> Iterator[Bucket]:
    found = Bucket(running)
    running.asked.clear()
    running.sent = 0
    yield found
    running.fault = None
    found.clear()


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ELSA file of more than two parts of an upload."""
    path = tmp_path_factory.mktemp("net") / "net.safetensors"
    rng = np.random.default_rng(4)
    network = {f"layer{i}": rng.standard_normal((512, 1024), np.float32) for i in range(6)}
    elsa.pack(network | {"bias": np.ones(7, np.float32)}, path, sparsities=[95, 80])
    assert path.stat().st_size > 2 * PART
    return path


@pytest.fixture(scope="module")
def dense(net: Path) -> Path:
    path = net.with_name("dense.safetensors")
    elsa.extract(net, path, level="dense")
    return path


def run(
    *words: object, give: bytes | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    command = [str(BIN / str(words[0])), *map(str, words[1:])]
    return subprocess.run(
        command, env=os.environ | environment, input=give, capture_output=True, check=False
    )


def same_files(bucket: Bucket, prefix: str, folder: Path) -> bool:
    """Whether a folder of the bucket holds what one here does, and nothing else."""
    found = {name.removeprefix(prefix): bucket.read(name) for name in bucket.names}
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return found == {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


# Reading


def test_what_is_read(net: Path, bucket: Bucket) -> None:
    """The header in one request, a tensor by its bytes, a network in few requests."""
    bucket.put("net.safetensors", net.read_bytes())
    bucket.server.asked.clear()
    url, size = f"{BUCKET}/net.safetensors", net.stat().st_size
    with elsa.open(url) as file:
        assert bucket.server.whats() == ["HEAD", "GET"]
        assert bucket.server.sent == 1 << 16
        bucket.server.asked.clear()
        bucket.server.sent = 0
        weights = file.tensor("layer3", 1)
        assert bucket.server.sent == weights.nbytes
        assert set(bucket.server.whats()) == {"GET"}
        assert all(asked.range for asked in bucket.server.asked)
    with elsa.open(net) as file:
        assert np.array_equal(weights, file.tensor("layer3", 1))
    bucket.server.asked.clear()
    bucket.server.sent = 0
    assert elsa.verify(url).digests == 2
    assert size <= bucket.server.sent <= size + (1 << 16)
    assert len(bucket.server.asked) < 12


# Writing


@pytest.mark.parametrize("kind", ["pack", "extract", "bitmask", "csr", "keep_levels", "stdin"])
@pytest.mark.parametrize("store", [BUCKET, "memory://made"])
def test_the_same_bytes_as_here(
    kind: str, store: str, net: Path, dense: Path, bucket: Bucket, tmp_path: Path
) -> None:
    import fsspec

    bucket.put("in/net.safetensors", net.read_bytes())
    bucket.put("in/dense.safetensors", dense.read_bytes())
    out, here = f"{store}/{kind}.safetensors", tmp_path / "here.safetensors"
    for source, target in ((net, here), (f"{BUCKET}/in/net.safetensors", out)):
        if kind == "pack":
            given = str(source).replace("net.", "dense.")
            elsa.pack(given, target, sparsities=[90, 50])
        elif kind == "stdin":
            with open(net, "rb") as stream:
                elsa.extract(stream, target, level=2)
        elif kind == "keep_levels":
            elsa.extract(source, target, level=1, keep_levels=True)
        else:
            layout: Any = "dense" if kind == "extract" else kind
            elsa.extract(source, target, level=2, layout=layout)
    with fsspec.open(out) as file:
        assert file.read() == here.read_bytes()
    if store == BUCKET:
        parts = sum(what == "part" for what in bucket.server.whats())
        assert parts == -(-here.stat().st_size // PART)
        assert bucket.uploads == []


@pytest.mark.parametrize("layout", ["dense", "bitmask"])
def test_shards(layout: Any, net: Path, dense: Path, bucket: Bucket, tmp_path: Path) -> None:
    """The index comes last, and from one store to another."""
    name = "m.safetensors.index.json"
    packed, here = tmp_path / "packed", tmp_path / "here"
    packed.mkdir()
    here.mkdir()
    elsa.pack(dense, packed / name, sparsities=[90, 50], max_shard_size=5 << 20)
    elsa.pack(dense, f"{BUCKET}/packed/{name}", sparsities=[90, 50], max_shard_size=5 << 20, jobs=2)
    assert same_files(bucket, "packed/", packed)
    completed = [asked.path for asked in bucket.server.asked if asked.what == "complete"]
    assert len(completed) == 4
    assert completed[-1] == f"/bucket/packed/{name}"
    elsa.extract(packed / name, here / name, level=1, layout=layout)
    elsa.extract(
        f"{BUCKET}/packed/{name}", f"{BUCKET}/level/{name}", level=1, layout=layout, jobs=2
    )
    for each in [each for each in bucket.names if each.startswith("packed")]:
        bucket.client.delete_object(Bucket="bucket", Key=each)
    assert same_files(bucket, "level/", here)
    assert bucket.uploads == []


@pytest.mark.parametrize("verb", ["pack", "extract"])
def test_progress(verb: str, net: Path, dense: Path, bucket: Bucket) -> None:
    """What is made first and sent then is counted twice, from nothing to all of it."""
    seen: list[tuple[int, int]] = []
    out = f"{BUCKET}/x.safetensors"
    if verb == "pack":
        elsa.pack(dense, out, sparsities=[90], progress=lambda *now: seen.append(now))
    else:
        elsa.extract(net, out, level=1, layout="csr", progress=lambda *now: seen.append(now))
    again = next(at for at in range(1, len(seen)) if seen[at][0] < seen[at - 1][0])
    made, sent = seen[:again], seen[again:]
    assert made[-1][0] == made[-1][1]
    assert sent == sorted(sent)
    assert sent[-1] == (len(bucket.read("x.safetensors")),) * 2


def test_the_commands(net: Path, dense: Path, bucket: Bucket, tmp_path: Path) -> None:
    """Local to store, store to store, standard input to a store; a summary with the size."""
    done = run("elsa-pack", dense, "--sparsities", "95,80", "-o", f"{BUCKET}/net.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(b"\ns3://bucket/net.safetensors: 12.6 MB\n")
    assert bucket.read("net.safetensors") == net.read_bytes()
    level = tmp_path / "level.safetensors"
    elsa.extract(net, level, level=1)
    for number, (source, give) in enumerate(
        [(f"{BUCKET}/net.safetensors", None), ("-", net.read_bytes())]
    ):
        out = f"{BUCKET}/level{number}.safetensors"
        done = run("elsa-extract", source, "-l", 1, "-o", out, give=give)
        assert done.returncode == 0, done.stderr
        assert done.stderr == f"{out}: level 1, 12.6 MB as dense\n".encode()
        assert bucket.read(f"level{number}.safetensors") == level.read_bytes()
    assert bucket.uploads == []


def test_model_directories(dense: Path, bucket: Bucket, tmp_path: Path) -> None:
    """With their side files; another run finds those, and refuses what is different."""
    model = tmp_path / "model"
    (model / "sub").mkdir(parents=True)
    (model / "model.safetensors").write_bytes(dense.read_bytes())
    (model / "config.json").write_text("{}")
    (model / "sub" / "words.txt").write_text("a b")
    (model / "sub" / "empty.txt").write_text("")
    here = tmp_path / "here"
    elsa.pack(model, here, sparsities=[90, 50])
    elsa.pack(model, f"{BUCKET}/packed", sparsities=[90, 50])
    assert same_files(bucket, "packed/", here)
    with pytest.raises(elsa.OutputExists, match=r"packed/model\.safetensors: exists already"):
        elsa.pack(model, f"{BUCKET}/packed", sparsities=[90, 50])
    elsa.pack(model, f"{BUCKET}/packed/", sparsities=[90, 50], force=True)
    assert same_files(bucket, "packed/", here)
    with pytest.raises(elsa.OutputExists, match=r"would be taken for model\.bitmask"):
        elsa.extract(here, f"{BUCKET}/packed", level=1, layout="bitmask")
    bucket.put("other/config.json", b"[]")
    with pytest.raises(elsa.OutputExists, match=r"other/config\.json: exists already"):
        elsa.extract(here, f"{BUCKET}/other", level=1)
    assert [name for name in bucket.names if name.startswith("other")] == ["other/config.json"]


# Fetching


def test_fetch_from_a_store(net: Path, bucket: Bucket, tmp_path: Path) -> None:
    """What is there is gone on with; only what is missing is transferred."""
    ship, out = tmp_path / "net.ship.safetensors", tmp_path / "out.ship.safetensors"
    elsa.ship(net, ship)
    elsa.ship(net, f"{BUCKET}/net.ship.safetensors")
    assert bucket.read("net.ship.safetensors") == ship.read_bytes()
    first = elsa.fetch(f"{BUCKET}/net.ship.safetensors", out, level=1)
    assert out.read_bytes() == ship.read_bytes()[: first.size]
    more = elsa.fetch(f"{BUCKET}/net.ship.safetensors", out, upgrade="dense")
    assert out.read_bytes() == ship.read_bytes()
    assert more.fetched < more.size == ship.stat().st_size


def test_fetch_shards_and_directories(net: Path, bucket: Bucket, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    index = "model.safetensors.index.json"
    elsa.extract(net, model / index, level=2, keep_levels=True, max_shard_size=5 << 20)
    (model / "config.json").write_text("{}")
    elsa.ship(model, tmp_path / "shipped")
    elsa.ship(model, f"{BUCKET}/shipped")
    assert same_files(bucket, "shipped/", tmp_path / "shipped")
    elsa.fetch(f"{BUCKET}/shipped", tmp_path / "here", level=1)  # with or without its slash
    elsa.fetch(f"{BUCKET}/shipped/", tmp_path / "here", upgrade="dense")
    assert same_files(bucket, "shipped/", tmp_path / "here")
    assert bucket.uploads == []


@pytest.mark.parametrize("upgrade", [False, True])
@pytest.mark.parametrize("out", ["s3://bucket/out", "s3://bucket/out/", "https://host/out"])
def test_fetch_to_a_store_is_refused(out: str, upgrade: bool, bucket: Bucket) -> None:
    """Before anything is asked for: a download grows in place, which nothing in a store does."""
    wish = {"upgrade": 1} if upgrade else {"level": 1}
    with pytest.raises(elsa.InvalidOption, match=rf"^{out}: .* copy it .* the store's own tool"):
        elsa.fetch(f"{BUCKET}/net.ship.safetensors", out, **wish)
    assert bucket.server.asked == []


def test_the_command_says_how_to_fetch_to_a_store(bucket: Bucket) -> None:
    secret = "s3://key:secret@bucket/out"
    done = run("elsa-fetch", f"{BUCKET}/net.ship.safetensors", "--level", 1, "-o", secret)
    expected = (
        b"error: s3://bucket/out: a download grows in place; fetch to a local path, and copy "
        b"it with the store's own tool, such as aws s3 cp\n"
    )
    assert (done.returncode, done.stderr) == (2, expected)
    assert bucket.server.asked == []


# What is refused


def test_existing_targets(net: Path, bucket: Bucket) -> None:
    bucket.put("old.safetensors", b"old")
    done = run("elsa-extract", net, "-l", 1, "-o", f"{BUCKET}/old.safetensors")
    expected = b"error: s3://bucket/old.safetensors: exists already; --force replaces it\n"
    assert (done.returncode, done.stderr) == (1, expected)
    assert bucket.read("old.safetensors") == b"old"
    assert "begin" not in bucket.server.whats()
    done = run("elsa-extract", net, "-l", 1, "-o", f"{BUCKET}/old.safetensors", "--force")
    assert done.returncode == 0, done.stderr
    assert len(bucket.read("old.safetensors")) > PART


def test_a_target_that_appears_meanwhile(net: Path, bucket: Bucket) -> None:
    def appear(asked: Asked, environ: dict[str, Any]) -> None:
        if asked.what == "part" and asked.query["partNumber"] == ["1"]:
            bucket.put("new.safetensors", b"of another")

    bucket.server.fault = appear
    with pytest.raises(elsa.OutputExists, match="exists already"):
        elsa.extract(net, f"{BUCKET}/new.safetensors", level=1)
    assert bucket.read("new.safetensors") == b"of another"
    assert bucket.uploads == []


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("https://host/x.safetensors", elsa.InvalidOption, "HTTP is read only"),
        ("s3://none/x.safetensors", elsa.RemoteError, "none/x.safetensors: no such bucket$"),
        ("s3://bucket", elsa.InvalidOption, "names no file"),
        ("s3://bucket/", elsa.InvalidOption, "names no file"),
        ("s3://bucket/folder", elsa.RemoteError, "is a directory"),
        ("nosuch://bucket/x", elsa.RemoteError, "Protocol not known: nosuch"),
    ],
)
def test_targets_that_cannot_be(
    target: str, kind: type[Exception], words: str, net: Path, bucket: Bucket
) -> None:
    """Before anything is read."""
    bucket.put("folder/x", b"")
    with pytest.raises(kind, match=words):
        elsa.extract(net, target, level=1)


def test_packages_that_are_missing(net: Path, tmp_path: Path) -> None:
    script = (
        f"import sys\nsys.modules[sys.argv[1]] = None\n{import_line('main')}\n"
        "main(['extract', sys.argv[2], '-l', '1', '-o', 's3://bucket/x.safetensors'])"
    )

    def complaint(package: str) -> bytes:
        command = [sys.executable, "-c", script, package, str(net)]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 1
        return done.stderr

    start = b"error: s3://bucket/x.safetensors: "
    assert complaint("s3fs") == start + b"Install s3fs to access S3\n"
    assert complaint("fsspec") == (
        start
        + b"only http and https are built in; for others, run: "
        + f"{install_command('remote')}\n".encode()
    )


def test_templates_stand_beside_files(tmp_path: Path) -> None:
    network = {"w": np.ones((4, 4), np.float32)}
    with pytest.raises(elsa.InvalidOption, match="in a store"):
        elsa.pack(network, f"{BUCKET}/x", sparsities=[50], template=tmp_path / "x.onnx")


# What goes wrong


def fails(what: str, at: int = 1, action: Callable[[Any], int | None] = lambda environ: 500) -> Any:
    """A fault of one kind of request, from the n-th on."""
    seen = 0

    def fault(asked: Asked, environ: dict[str, Any]) -> int | None:
        nonlocal seen
        seen += asked.what == what
        return action(environ) if asked.what == what and seen >= at else None

    return fault


@pytest.mark.parametrize(
    ("what", "at", "action"),
    [("begin", 1, "500"), ("part", 1, "cut"), ("part", 3, "500"), ("complete", 1, "cut")],
)
@pytest.mark.parametrize("keep_levels", [False, True])
def test_a_store_that_fails(
    what: str, at: int, action: str, keep_levels: bool, net: Path, bucket: Bucket
) -> None:
    """No object, and no upload that is left."""
    bucket.server.fault = fails(what, at, cut if action == "cut" else lambda environ: 500)
    out = f"{BUCKET}/x.safetensors"
    with pytest.raises(elsa.RemoteError, match=rf"^{out}: (Try again|.*connection.*)$"):
        elsa.extract(net, out, level=2, keep_levels=keep_levels)
    bucket.server.fault = None
    assert (bucket.names, bucket.uploads) == ([], [])


def test_a_server_that_goes_away(net: Path, bucket: Bucket) -> None:
    """Nobody can take back what nobody answers for, but nothing is visible."""
    gone = threading.Event()

    def go(asked: Asked, environ: dict[str, Any]) -> int | None:
        if asked.what == "part":
            gone.set()
        return cut(environ) if gone.is_set() else None

    bucket.server.fault = go
    done = run("elsa-extract", net, "-l", 1, "-o", f"{BUCKET}/x.safetensors")
    bucket.server.fault = None
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: s3://bucket/x.safetensors: ")
    assert done.stderr.count(b"\n") == 1
    assert bucket.names == []


@pytest.mark.parametrize("store", ["s3://bucket", "memory://late"])
@pytest.mark.parametrize("layout", ["dense", "bitmask"])
def test_a_source_that_fails_late(
    layout: Any, store: str, net: Path, bucket: Bucket, tmp_path: Path
) -> None:
    import fsspec

    damaged = tmp_path / "damaged.safetensors"
    content = bytearray(net.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(elsa.ChecksumMismatch):
        elsa.extract(damaged, f"{store}/x.safetensors", level=1, layout=layout)
    assert "begin" not in bucket.server.whats()
    assert not fsspec.filesystem(store[: store.index(":")]).exists(f"{store}/x.safetensors")
    assert (bucket.names, bucket.uploads) == ([], [])


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_shards_appear_together_or_not(at: int, force: bool, dense: Path, bucket: Bucket) -> None:
    """What has appeared goes again, and an old index goes before its shards do."""
    name = "m.safetensors.index.json"
    if force:
        elsa.pack(dense, f"{BUCKET}/{name}", sparsities=[90], max_shard_size=5 << 20)
    bucket.server.fault = fails("complete", at)
    with pytest.raises(elsa.RemoteError):
        elsa.pack(
            dense, f"{BUCKET}/{name}", sparsities=[90, 50], max_shard_size=5 << 20, force=force
        )
    bucket.server.fault = None
    left = [f"m-0000{n}-of-00003.safetensors" for n in range(1, 4)] if force else []
    assert bucket.names == left[min(at, 4) - 1 :]
    assert bucket.uploads == []


def test_an_index_is_there_only_with_its_shards(dense: Path, bucket: Bucket) -> None:
    """Also while old shards are replaced."""
    target = f"{BUCKET}/m.safetensors.index.json"
    elsa.pack(dense, target, sparsities=[90], max_shard_size=5 << 20)
    seen = []

    def look(asked: Asked, environ: dict[str, Any]) -> None:
        if asked.what == "complete":
            seen.append("m.safetensors.index.json" in bucket.names)

    bucket.server.fault = look
    elsa.pack(dense, target, sparsities=[90, 50], max_shard_size=5 << 20, force=True)
    assert seen == [False] * 4
    assert elsa.verify(target).levels == 2


# Signals


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "code", "what", "at", "options"),
    [
        (signal.SIGINT, 130, "begin", 1, []),
        (signal.SIGTERM, 143, "begin", 1, ["--keep-levels"]),
        (signal.SIGTERM, 143, "part", 1, []),
        (signal.SIGINT, 130, "part", 2, ["--keep-levels"]),
    ],
)
def test_signals(
    number: int, code: int, what: str, at: int, options: list[str], net: Path, bucket: Bucket
) -> None:
    """While an upload is begun and while parts are sent: it is taken back, and nothing is said."""
    found, complaint = interrupted(
        bucket, number, what, at, "elsa-extract", net, "-l", "2", *options, "-o", f"{BUCKET}/x"
    )
    assert (found, complaint) == (code, b"")
    assert (bucket.names, bucket.uploads) == ([], [])


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("at", [1, 2, 4])
def test_signals_while_shards_appear(at: int, dense: Path, bucket: Bucket) -> None:
    """All of them, or none."""
    words = ["--sparsities", "90,50", "--max-shard-size", "5MiB", "-o", f"{BUCKET}/m.index.json"]
    found, complaint = interrupted(
        bucket, signal.SIGTERM, "complete", at, "elsa-pack", dense, *words
    )
    assert (found, complaint) == (143, b"")
    assert len(bucket.names) in (0, 4)
    assert bucket.uploads == []


def interrupted(
    bucket: Bucket, number: int, what: str, at: int, *words: object
) -> tuple[int, bytes]:
    """Exit code and complaint of a command that gets a signal while a request is answered."""
    reached = threading.Event()

    def hold(environ: object) -> None:
        if not reached.is_set():
            reached.set()
            time.sleep(0.5)

    bucket.server.fault = fails(what, at, hold)
    with subprocess.Popen(
        [str(BIN / str(words[0])), *map(str, words[1:])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert reached.wait(30)
            process.send_signal(number)
            _, complaint = process.communicate(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    bucket.server.fault = None
    time.sleep(0.6)  # what was asked for before is answered
    return process.returncode, complaint


# Memory


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_does_not_grow(bucket: Bucket, tmp_path: Path) -> None:
    script = f"""
import sys
{import_line("main")}
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print([n for n in open("/proc/self/status") if "VmHWM" in n][0].split()[1])
"""

    def peak(*words: object) -> int:
        command = [sys.executable, "-c", script, *map(str, words)]
        done = subprocess.run(command, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return int(done.stdout.split()[-1]) << 10

    peaks: dict[str, list[int]] = {"pack": [], "extract": []}
    for size in (10, 50):
        block = np.random.default_rng(0).standard_normal((size, 1 << 18), np.float32)
        dense, out = tmp_path / f"{size}.safetensors", f"{BUCKET}/{size}.safetensors"
        elsa.pack({"w": block}, dense, sparsities=[90])
        elsa.extract(dense, dense, level="dense", force=True)
        peaks["pack"].append(peak("pack", dense, "--sparsities", "90,50", "-q", "-o", out))
        peaks["extract"].append(peak("extract", out, "-l", 1, "-q", "-o", f"{out}.level"))
        digest = hashlib.sha256(bucket.read(f"{size}.safetensors.level")).hexdigest()
        elsa.pack(dense, tmp_path / "here", sparsities=[90, 50], force=True)
        elsa.extract(tmp_path / "here", tmp_path / "level", level=1, force=True)
        assert digest == hashlib.sha256((tmp_path / "level").read_bytes()).hexdigest()
    for small, large in peaks.values():
        assert large < small + (16 << 20)
