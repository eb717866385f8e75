"""What every command does with every vector and with real models, one line for each run.

Two versions of the project should print the same:

    OLD/.venv/bin/python fuzz/outputs.py MODEL.onnx MODEL.safetensors ... > old
    NEW/.venv/bin/python fuzz/outputs.py MODEL.onnx MODEL.safetensors ... > new
    diff old new

A line has the command, its exit code, what it printed, and the hashes of the files it wrote. The
commands run in this process: one process each would take half an hour.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from internals import _start

VECTORS = Path(__file__).resolve().parents[1] / "spec" / "vectors"
OUT = "out"


def run(words: list[str], stdin: bytes = b"") -> None:
    """Run a command in the current folder and print what it did."""
    scripts = entry_points(group="console_scripts", name=words[0])
    if not scripts:  # an older version has fewer commands
        return
    main = next(iter(scripts)).load()
    streams = [io.TextIOWrapper(io.BytesIO(content), "utf-8") for content in (stdin, b"", b"")]
    kept = (sys.stdin, sys.stdout, sys.stderr, sys.argv)
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.argv = words
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdin, sys.stdout, sys.stderr, sys.argv = kept
    printed = []
    for stream in streams[1:]:
        stream.flush()
        printed.append(stream.buffer.getvalue())  # type: ignore[attr-defined]
    text = printed[1].decode()
    row = [" ".join(words), str(code or 0), _hash(printed[0]), json.dumps(text), *_written()]
    print("\t".join(row), flush=True)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16] if content else "-"


def _written() -> Iterator[str]:
    """Name and hash of what stands in the output folder, which is emptied."""
    for path in sorted(Path(OUT).rglob("*")):
        if path.is_file():
            yield f"{path.name}={_hash(path.read_bytes())}"
    shutil.rmtree(OUT)
    os.mkdir(OUT)


def look(path: str) -> None:
    """All that can be done with a file that may be valid or not."""
    run(["elsa-verify", path])
    run(["elsa-verify", path, "--json"])
    run(["elsa-inspect", path])
    run(["elsa-inspect", path, "--json"])
    run(["elsa-inspect", path, "--html", f"{OUT}/page.html", "--full"])
    for level in ("1", "2", "3", "dense"):
        run(["elsa-extract", path, "--level", level, "-o", f"{OUT}/level.safetensors"])
        run(["elsa-extract", path, "--level", level, "-o", f"{OUT}/l.safetensors.index.json"])
        for layout in ("bitmask", "csr"):
            words = ["--level", level, "--layout", layout, "-o", f"{OUT}/level.safetensors"]
            run(["elsa-extract", path, *words])
        words = ["--level", level, "--keep-levels", "-o", f"{OUT}/cut.safetensors"]
        run(["elsa-extract", path, *words])
    run(["elsa-extract", path, "--sparsity", "50", "-o", f"{OUT}/level.safetensors"])
    run(
        ["elsa-extract", path, "--max-size", "2kB", "--layout", "csr", "-o", f"{OUT}/l.safetensors"]
    )
    if not path.endswith(".index.json"):
        content = Path(path).read_bytes()
        run(["elsa-extract", "-", "--level", "1", "-o", "-"], content)
        run(["elsa-extract", "-", "--level", "1", "--layout", "csr", "-o", "-"], content)
        run(["elsa-verify", "-"], content)


def deliver(path: str) -> None:
    """Make a delivery file, bring its first level and then more, and give the whole back."""
    shipped = "shipped" + "".join(Path(path).suffixes[-3:])
    run(["elsa-ship", path, "-o", f"{OUT}/{shipped}", "--json"])
    run(["elsa-ship", path, "-o", shipped, "-q"])  # what is in OUT is gone, and this is read
    if not os.path.exists(shipped):
        return
    run(["elsa-inspect", shipped, "--json"])
    # --whole: what --restore was called, which both versions know
    run(["elsa-extract", shipped, "--whole", "-o", f"{OUT}/whole{''.join(Path(path).suffixes)}"])
    os.mkdir("fetched")  # a folder of its own: shards have the names of their source's
    first = f"fetched/{shipped}"
    for wish in (["--level", "1"], ["--upgrade", "dense"]):
        run(["elsa-fetch", shipped, *wish, "-o", first])
        run(["elsa-verify", first])
        run(["elsa-extract", first, "--level", "1", "-o", f"{OUT}/1.safetensors"])
    shutil.rmtree("fetched")
    for made in Path().glob("*shipped*"):
        made.unlink()


def pack_directory(path: str) -> None:
    """Pack a model directory, and take a level out of it."""
    os.mkdir("model")
    shutil.copy(path, "model/model.safetensors")
    Path("model/config.json").write_text('{"vocab_size": 97}')
    for words in (["--sparsities", "90,50"], ["--sparsities", "1:4,2:4", "--nest-all"]):
        run(["elsa-pack", "model", *words, "-o", "packed", "--json"])
        for layout in ("dense", "bitmask"):
            run(["elsa-extract", "packed", "--level", "1", "--layout", layout, "-o", f"{OUT}/d"])
        shutil.rmtree("packed", ignore_errors=True)
    shutil.rmtree("model")


def pack(path: str) -> list[str]:
    """Pack a checkpoint in several ways, and give the files to look at."""
    made = []
    ways = {
        "global": ["--sparsities", "95,90,80"],
        "uniform": ["--sparsities", "90,50", "--scope", "uniform", "--rounding", "overwrite"],
        "many": ["--sparsities", ",".join(str(s) for s in range(98, 48, -1))],
        "shards": ["--sparsities", "95,90", "--max-shard-size", "1MB"],
    }
    for name, words in ways.items():
        suffix = ".safetensors.index.json" if name == "shards" else ".safetensors"
        target = f"{Path(path).stem}-{name}{suffix}"
        if path.endswith(".onnx") and name == "global":
            words = [*words, "--template", f"{Path(path).stem}.template.onnx"]
        run(["elsa-pack", path, *words, "-o", target, "--json"])
        made.append(target)
    return [target for target in made if os.path.exists(target)]


def export(packed: str, template: str) -> None:
    """Everything `elsa-export` does with a packed ONNX model."""
    for level in ("1", "3", "dense"):
        for extra in ([], ["--sparse"], ["--fold-batch-norm"], ["--external-data"]):
            words = [packed, "--onnx", template, "--level", level, *extra]
            run(["elsa-export", *words, "-o", f"{OUT}/m.onnx"])
    run(["elsa-export", packed, "--onnx", template, "--all-levels", "-o", "all.onnx", "-f"])


def main(models: list[str]) -> None:
    """Look at the vectors, then pack, look at and export the models."""
    paths = [os.path.abspath(model) for model in models]
    _start.end_on_signals = lambda: None  # it would take two open files for each command
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.mkdir(OUT)
        shutil.copytree(VECTORS, "vectors")
        for path in sorted(Path("vectors").rglob("*.safetensors*")):
            look(str(path))
            deliver(str(path))
        for path in paths:
            local = os.path.basename(path)
            shutil.copy(path, local)
            for packed in pack(local):
                look(packed)
                deliver(packed)
                if packed.endswith("-global.safetensors"):
                    run(["elsa-extract", packed, "--level", "dense", "-o", "dense.safetensors"])
                    pack_directory("dense.safetensors")
                    os.remove("dense.safetensors")
            template = f"{Path(local).stem}.template.onnx"
            if os.path.exists(template):
                export(f"{Path(local).stem}-global.safetensors", template)


if __name__ == "__main__":
    main(sys.argv[1:])
