"""The commands as people run them: files, pipes, exit codes, nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bits import same_bits
from safetensors.numpy import load_file, save_file

import elsa_format as elsa

BIN = Path(sys.executable).parent


def run(*words: object, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [str(BIN / str(words[0])), *map(str, words[1:])]
    return subprocess.run(command, input=stdin, capture_output=True, check=False)


def ok(*words: object, stdin: bytes | None = None) -> bytes:
    done = run(*words, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_the_way_from_a_checkpoint_to_a_device(
    network: dict[str, np.ndarray], tmp_path: Path
) -> None:
    dense, net, level = (tmp_path / f"{n}.safetensors" for n in ("dense", "net", "level"))
    save_file(network, dense)
    done = run("elsa-pack", dense, "--sparsities", "95,90,80", "-o", net)
    assert done.returncode == 0
    assert done.stdout == b""
    assert b"not nested (1-dimensional): 2 tensors: bn/mean, dense/bias" in done.stderr
    ok("elsa-verify", net)
    ok("elsa-extract", net, "--level", "2", "-o", level)
    with elsa.open(net) as file:
        assert same_bits(load_file(level), file.load(2))


def test_pipes_all_the_way(packed: Path) -> None:
    content = packed.read_bytes()
    cut = ok("elsa-extract", "-", "--level", "2", "--keep-levels", "-o", "-", stdin=content)
    assert b"2 levels" in ok("elsa-verify", "-", stdin=cut)
    assert b'"level": 2' in ok("elsa-inspect", "-", "--json", stdin=cut)
    level = ok("elsa-extract", "-", "--level", "1", "-o", "-", stdin=cut)
    straight = ok("elsa-extract", packed, "--level", "1", "-o", "-")
    assert level == straight
    sparse = ok("elsa-extract", packed, "--level", "1", "--layout", "csr", "-o", "-")
    assert len(sparse) < len(level)


def test_a_shell_pipeline(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "level.safetensors"
    script = f"cat {packed} | {BIN}/elsa-extract - --level 2 -o - | cat > {out}"
    subprocess.run(["bash", "-o", "pipefail", "-c", script], check=True)
    with elsa.open(packed) as file:
        assert same_bits(load_file(out), file.load(2))


@pytest.mark.parametrize(
    ("choice", "level"),
    [
        (["--sparsity", "90"], 2),
        (["--sparsity", "0.9"], 2),
        (["--sparsity", "91%"], 1),
        (["--sparsity", "5"], 3),
        (["--max-size", "1TB"], 3),
    ],
)
def test_a_level_is_picked_for_the_device(packed: Path, choice: list[str], level: int) -> None:
    picked = ok("elsa-extract", packed, *choice, "--layout", "bitmask", "-o", "-")
    named = ok("elsa-extract", packed, "--level", level, "--layout", "bitmask", "-o", "-")
    assert picked == named


def test_a_size_is_kept(packed: Path) -> None:
    with elsa.open(packed) as file:
        sizes = [file.size(t, "bitmask") for t in (1, 2, 3)]
    for level, size in enumerate(sizes, 1):
        out = ok("elsa-extract", packed, "--max-size", size, "--layout", "bitmask", "-o", "-")
        assert len(out) == max(s for s in sizes if s <= size)
        assert level
    done = run("elsa-extract", packed, "--max-size", "10", "--layout", "bitmask", "-o", "-")
    assert done.returncode == 2
    assert b"no level fits 10 bytes" in done.stderr


def test_inspect_prints_levels_and_layers(rich: Path) -> None:
    text = ok("elsa-inspect", rich).decode()
    assert "95%" in text
    assert "conv/kernel" in text
    found = json.loads(ok("elsa-inspect", rich, "--json"))
    assert [level["metrics"]["accuracy"] for level in found["levels"]] == [0.9, 0.93, 0.95]
    assert {t["name"]: t["kind"] for t in found["tensors"]}["bn/mean"] == "per-level"
    with elsa.open(rich) as file:
        assert found["levels"][1]["sizes"]["csr"] == file.size(2, "csr")


def test_inspect_reads_the_header_only(rich: Path, tmp_path: Path) -> None:
    content = bytearray(rich.read_bytes())
    content[-1] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    ok("elsa-inspect", tmp_path / "damaged")
    assert run("elsa-verify", tmp_path / "damaged").returncode == 3


@pytest.mark.parametrize("command", ["elsa-extract --level 2 -o OUT", "elsa-verify"])
def test_a_damaged_file_gives_one_line_and_no_output(
    rich: Path, tmp_path: Path, command: str
) -> None:
    content = bytearray(rich.read_bytes())
    content[-1] ^= 1
    folder = tmp_path / "out"
    folder.mkdir()
    (tmp_path / "bad").write_bytes(content)
    program, *options = command.replace("OUT", str(folder / "level")).split()
    done = run(program, tmp_path / "bad", *options)
    assert done.returncode == 3
    assert done.stderr.decode().count("\n") == 1
    assert "bad: tensor 'bn/mean': checksum" in done.stderr.decode()
    assert list(folder.iterdir()) == []
    piped = run("elsa-extract", tmp_path / "bad", "--level", "1", "-o", "-")
    assert piped.returncode == 3


def test_exit_codes(rich: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    assert run("elsa-extract", tmp_path / "none", "--level", "1", "-o", out).returncode == 1
    assert run("elsa-extract", rich, "--level", "9", "-o", out).returncode == 2
    assert run("elsa-extract", rich, "--level", "x", "-o", out).returncode == 2
    assert run("elsa-extract", rich, "-o", out).returncode == 2
    assert run("elsa-extract", rich, "--level", "1", "--sparsity", "9", "-o", out).returncode == 2
    assert not out.exists()
    out.write_text("mine")
    refused = run("elsa-extract", rich, "--level", "1", "-o", out)
    assert refused.returncode == 1
    assert b"--force" in refused.stderr
    assert out.read_text() == "mine"
    ok("elsa-extract", rich, "--level", "1", "-o", out, "--force")
    ok("elsa-extract", rich, "--level", "1", "-o", "/dev/null")
    packed_again = run("elsa-pack", rich, "--sparsities", "50", "-o", tmp_path / "p")
    assert packed_again.returncode == 3


def test_pack_from_files_of_every_kind(network: dict[str, np.ndarray], tmp_path: Path) -> None:
    np.savez(tmp_path / "dense.npz", **network)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "n.npz", **{"dense/kernel": rng.integers(1, 4, (32, 10))})
    net = tmp_path / "net.safetensors"
    report = json.loads(
        ok(
            "elsa-pack",
            tmp_path / "dense.npz",
            "--counters",
            tmp_path / "n.npz",
            "-o",
            net,
            "--json",
        )
    )
    assert list(report["nested"]) == ["dense/kernel"]
    assert report["shared"]["conv/kernel"] == "no counters given"
    ok("elsa-extract", net, "--level", "1", "-o", tmp_path / "l1.safetensors")
    ok("elsa-extract", net, "--level", "dense", "-o", tmp_path / "d.safetensors")
    again = tmp_path / "again.safetensors"
    ok("elsa-pack", tmp_path / "d.safetensors", "--level", tmp_path / "l1.safetensors",
       "--include", "dense/kernel", "--names", "tiny", "-o", again)  # fmt: skip
    with elsa.open(again) as file:
        assert [level.name for level in file.levels] == ["tiny"]
        assert same_bits(file.load(1), load_file(tmp_path / "l1.safetensors"))


def test_one_group_holds_all_commands() -> None:
    text = ok("elsa", "--help").decode()
    for name in ("pack", "extract", "inspect", "verify", "export", "train"):
        assert f"\n  {name} " in text
    assert ok("elsa", "--version").decode().startswith(f"elsa {elsa.__version__} (kernels: ")


def test_levels_that_are_kept_have_one_form(packed: Path, tmp_path: Path) -> None:
    out = tmp_path / "cut.safetensors"
    for extra in (["-l", 2, "--layout", "csr"], ["--max-size", "1GB"]):
        done = run("elsa-extract", packed, "--keep-levels", *extra, "-o", out)
        assert done.returncode == 2
        assert b"--keep-levels goes with" in done.stderr
        assert not out.exists()
    done = run("elsa-extract", packed, "--keep-levels", "--sparsity", 90, "-o", out)
    assert b": levels 1 to 2, " in done.stderr
    assert b" as " not in done.stderr


def test_counters_in_the_papers_form(network: dict[str, np.ndarray], tmp_path: Path) -> None:
    dense, steps, net = (tmp_path / n for n in ("d.safetensors", "n.npz", "net.safetensors"))
    save_file(network, dense)
    np.savez(steps, **{"dense/kernel": np.arange(320).reshape(32, 10) % 4 + 1})
    ok("elsa-pack", dense, "--counters", steps, "--levels", 3, "-q", "-o", net)
    assert b"3 levels" in ok("elsa-verify", net)
    done = run("elsa-pack", dense, "--counters", steps, "-f", "-o", net)
    assert b"warning: no counter is 0" in done.stderr
    assert b"4 levels" in ok("elsa-verify", net)
    done = run("elsa-pack", dense, "--sparsities", 90, "--levels", 1, "-f", "-o", net)
    assert done.returncode == 2
