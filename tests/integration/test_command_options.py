"""Options: the same in all commands; what is wrong with them is exit code 2, and said so."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from internals import import_line, main
from safetensors.numpy import load_file, save_file

import elsa_format as elsa
from elsa_format.cli import install_command

BIN = Path(sys.executable).parent
COMMANDS = ("pack", "extract", "inspect", "verify", "record", "export")


Done = subprocess.CompletedProcess[str]


def run(*words: object) -> Done:
    """Run a command, or the group, in this process, which is quicker."""
    program, *rest = map(str, words)
    arguments = [*program.split("-")[1:], *rest]
    done = CliRunner().invoke(main, arguments, prog_name="elsa")
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Done(arguments, done.exit_code, done.stdout, done.stderr)


def run_script(*words: object, **environment: str) -> Done:
    """Run a command as users do."""
    return subprocess.run(
        [str(BIN / str(words[0])), *map(str, words[1:])],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs: a checkpoint, its ELSA file, sparse and other checkpoints, an ONNX model."""
    onnx = pytest.importorskip("onnx")
    helper = onnx.helper
    path = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    layer = rng.standard_normal((32, 10)).astype(np.float32)
    tensors = {"layer": layer, "bias": np.zeros(10, np.float32)}
    save_file(tensors, path / "dense.safetensors")
    save_file({"steps": np.arange(9)}, path / "integers.safetensors")
    save_file({**tensors, "bias": np.ones(10, np.float32)}, path / "other.safetensors")
    np.savez(path / "counters.npz", layer=np.zeros((32, 10), np.int64))
    values = [("x", 32), ("y", 10)]
    ends = [helper.make_tensor_value_info(n, 1, ["batch", size]) for n, size in values]
    nodes = [
        helper.make_node("MatMul", ["x", "layer"], ["z"]),
        helper.make_node("Add", ["z", "bias"], ["y"]),
    ]
    initial = [onnx.numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph(nodes, "linear", ends[:1], ends[1:], initial)
    imports = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path / "model.onnx")
    net = path / "net.safetensors"
    elsa.pack(path / "model.onnx", net, sparsities=[95, 90, 80], template=path / "net.onnx")
    return path


PACK, EXTRACT = "elsa-pack dense.safetensors -o OUT", "elsa-extract net.safetensors -o OUT"
EXPORT = "elsa-export net.safetensors --onnx net.onnx -o OUT"


@pytest.mark.parametrize(
    "words",
    [
        f"{PACK} --sparsities 80,90",
        f"{PACK} --sparsities 90,90",
        f"{PACK} --sparsities nan",
        f"{PACK} --sparsities inf",
        f"{PACK} --sparsities 1e999999999",
        f"{PACK} --sparsities -5",
        f"{PACK} --sparsities 100",
        f"{PACK} --sparsities x",
        f"{PACK} --sparsities ,",
        f"{PACK} --sparsities 4:2",
        f"{PACK} --sparsities 0:4",
        f"{PACK} --sparsities 1:0",
        f"{PACK} --sparsities 2:4,1:4",
        f"{PACK} --sparsities 2:4,50",
        f"{PACK} --sparsities 2:4",
        f"{PACK} --sparsities 1:2 --axis 7",
        f"{PACK} --sparsities 1:2 --axis x",
        f"{PACK} --sparsities 90,80 --names one",
        f"{PACK} --sparsities 90,80 --names one,two,three",
        f"{PACK} --sparsities 90 --include nothing",
        f"{PACK} --sparsities 90 --exclude nothing",
        f"{PACK} --sparsities 90 --exclude *",
        f"{PACK} --sparsities 90 --per-level bias",
        f"{PACK} --level dense.safetensors --per-level nothing",
        f"{PACK} --sparsities 90 --template t.onnx",
        f"{PACK} --sparsities 90 --max-shard-size 5MB",
        f"{PACK}.index.json --sparsities 90 --max-shard-size 0",
        f"{PACK}.index.json --sparsities 90 --max-shard-size {'9' * 400}",
        f"{PACK} --sparsities 90 --jobs 0",
        f"{PACK} --sparsities 90 --scope layer",
        f"{PACK} --sparsities 90 --rounding Nearest",
        f"{PACK} --sparsities 90 --counters counters.npz",
        f"{PACK} --sparsities 90 --levels 1",
        "elsa-pack model.onnx --sparsities 90 --template t.onnx -o -",
        f"{PACK}",
        "elsa-pack model.onnx --sparsities 90 -o OUT --template /elsewhere/t.onnx",
        f"{EXTRACT}",
        f"{EXTRACT} --level 4",
        f"{EXTRACT} --level 0",
        f"{EXTRACT} --level -1",
        f"{EXTRACT} --level 85%",
        f"{EXTRACT} --level 1 --sparsity 90",
        f"{EXTRACT} --sparsity nan",
        f"{EXTRACT} --sparsity 120",
        f"{EXTRACT} --sparsity 99",
        f"{EXTRACT} --max-size 1",
        f"{EXTRACT} --max-size many",
        f"{EXTRACT} --level 1 --layout coo",
        f"{EXTRACT} --level dense --layout csr",
        f"{EXPORT}",
        f"{EXPORT} --level 9",
        f"{EXPORT} --level none",
        f"{EXPORT} --max-size 1",
        f"{EXPORT} --level 1 --level-input",
        f"{EXPORT} --all-levels --sparse",
        f"{EXPORT} --web --level 1",
        "elsa-export net.safetensors --onnx net.onnx --level 1 --external-data -o -",
        "elsa-export net.safetensors --onnx net.onnx --level 1 --external-data -o /dev/null",
        "elsa-export net.safetensors --onnx net.onnx --all-levels -o /elsewhere/levels.onnx",
        "elsa-inspect net.safetensors --json --html OUT",
        "elsa-inspect net.safetensors --full",
        "elsa-inspect net.safetensors -o net.safetensors --force",
        "elsa-verify net.safetensors -o net.safetensors --force",
        "elsa-verify net.safetensors --jobs none",
        "elsa-verify",
        "elsa nothing",
        "elsa-train nothing",
    ],
)
def test_wrong_options(words: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    done = run(*words.replace("OUT", str(tmp_path / "out")).split())
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].lower().startswith("error: ")
    assert (sorted(folder.iterdir()), list(tmp_path.iterdir())) == (before, [])


@pytest.mark.parametrize(
    "words",
    [
        "elsa-pack integers.safetensors --sparsities 90 -o OUT",
        f"{PACK} --level other.safetensors",
        f"{PACK} --level integers.safetensors",
        f"{PACK} --counters counters.npz",
        "elsa-pack net.safetensors --sparsities 90 -o OUT",
        "elsa-extract dense.safetensors --level 1 -o OUT",
        "elsa-inspect model.onnx",
        "elsa-verify counters.npz",
        "elsa-export net.safetensors --onnx net.safetensors --level 1 -o OUT",
    ],
)
def test_wrong_files(words: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    done = run(*words.replace("OUT", str(tmp_path / "out")).split())
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("hidden", "extra", "words"),
    [
        ("onnx", "onnx", "export net.safetensors --onnx net.onnx --level 1 -o OUT"),
        ("onnxruntime", "onnx", "export net.safetensors --onnx net.onnx --level 1 -o OUT"),
        ("onnx", "onnx", "pack model.onnx --sparsities 90 -o OUT"),
        ("fsspec", "remote", "verify memory://net.safetensors"),
        ("jax", "train", "train digits --out OUT"),
        # Before anything else is said of the words, or read of the files, that are wrong, too.
        ("onnx", "onnx", "export"),
        ("onnxruntime", "onnx", "export nothing --no-such-option"),
        ("onnx", "onnx", "bench"),
        ("onnxruntime", "onnx", "bench nothing.safetensors --onnx nothing.onnx"),
        ("transformers", "transformers", "bench nothing --text nothing.txt"),
        ("transformers", "transformers", "bench nothing --text=nothing.txt"),
        ("jax", "train", "train"),
        ("optax", "train", "train nothing --no-such-option"),
        ("flax", "train", "train nothing.toml"),
        ("PIL", "train", "train recalibrate nothing.safetensors"),
    ],
)
def test_a_missing_extra(
    hidden: str, extra: str, words: str, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(folder)
    name, *rest = words.replace("OUT", str(tmp_path / "out")).split()
    script = f"import sys; sys.modules[{hidden!r}] = None; {import_line('_start')}; "
    done = subprocess.run(
        [sys.executable, "-c", f"{script}_start.{name}()", *rest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1
    assert f"run: {install_command(extra)}\n" in done.stderr


@pytest.mark.parametrize("words", ["export --help", "bench -h", "train --help", "train list"])
def test_help_needs_no_extra(words: str) -> None:
    hidden = dict.fromkeys(("onnx", "onnxruntime", "jax", "flax", "optax"))
    name, *rest = words.split()
    script = f"import sys; sys.modules.update({hidden}); {import_line('_start')}; "
    done = subprocess.run(
        [sys.executable, "-c", f"{script}_start.{name}()", *rest],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_options_are_in_all_commands(name: str) -> None:
    texts = [run("elsa", name, "-h").stdout, run_script(f"elsa-{name}", "--help").stdout]
    for text in texts:
        for option in ("-h, --help", "--version", "-q, --quiet", "--json", "-o, --output"):
            assert option in text
        assert "-f, --force" in text
    assert run_script(f"elsa-{name}", "--version").stdout.startswith(
        f"elsa-{name} {elsa.__version__} "
    )


@pytest.mark.parametrize(
    "words",
    [
        f"{PACK} --sparsities 90",
        f"{EXTRACT} --level 1",
        f"{EXTRACT} --level 2 --keep-levels",
        f"{EXPORT} --level 1",
        f"{EXPORT.replace('OUT', 'levels.onnx')} --all-levels --force",
        "elsa-inspect net.safetensors --output OUT",
        "elsa-inspect net.safetensors --html OUT",
        "elsa-verify net.safetensors --output OUT",
    ],
)
def test_quiet_says_nothing(words: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    done = run(*words.replace("OUT", str(tmp_path / "out")).split(), "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_quiet_leaves_the_answer_and_errors(folder: Path) -> None:
    net = folder / "net.safetensors"
    assert run("elsa-verify", net, "-q").stdout == ""
    assert run("elsa-inspect", net, "-q").stdout == run("elsa-inspect", net).stdout != ""
    assert run("elsa-verify", folder / "dense.safetensors", "-q").stderr.startswith("error: ")


def test_results_as_json(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    levels = tmp_path / "levels.onnx"
    for words, expected in {
        f"{PACK} --sparsities 90": {"output": str(out), "bits": 1, "per_level": []},
        f"{EXTRACT} --level 90% --layout csr -f": {
            "output": str(out), "level": 2, "layout": "csr"
        },
        f"{EXTRACT} --level dense -f": {"output": str(out), "level": "dense", "layout": "dense"},
        f"{EXPORT} --sparsity 80 -f": {"output": str(out), "level": 3},
        f"elsa-export net.safetensors --onnx net.onnx --all-levels -o {folder}/levels.onnx -f": {
            "output": f"{folder}/levels.onnx", "level": "all"
        },
        "elsa-verify net.safetensors": {"valid": True, "levels": 3},
        "elsa-inspect net.safetensors": {"bits": 2, "path": "net.safetensors"},
    }.items():  # fmt: skip
        done = run(*words.replace("OUT", str(out)).split(), "--json")
        assert (done.returncode, done.stderr) == (0, ""), words
        found = json.loads(done.stdout)
        assert expected.items() <= found.items()
        if "output" in found:
            assert found["size"] == os.path.getsize(found["output"])
    assert not levels.exists()


@pytest.mark.parametrize("target", ["-", "/dev/stdout"])
@pytest.mark.parametrize("words", [f"{PACK} --sparsities 90", f"{EXTRACT} -l 1", f"{EXPORT} -l 1"])
def test_data_stays_alone_on_stdout(
    words: str, target: str, folder: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(folder)
    assert run(*words.replace("OUT", str(tmp_path / "out")).split()).returncode == 0
    command = [str(BIN / word) for word in words.split()[:1]] + words.split()[1:]
    done = subprocess.run(
        [target if word == "OUT" else word for word in command] + ["--json"],
        capture_output=True,
        check=True,
    )
    assert done.stdout == (tmp_path / "out").read_bytes()
    assert json.loads(done.stderr)["output"] == target


def test_what_is_printed_goes_to_a_file(folder: Path, tmp_path: Path) -> None:
    net, out = folder / "net.safetensors", tmp_path / "out"
    for words in (["elsa-inspect", net], ["elsa-inspect", net, "--json"], ["elsa-verify", net]):
        out.write_text("old")
        refused = run(*words, "-o", out)
        assert (refused.returncode, refused.stderr) == (
            1,
            f"error: {out}: exists already; --force replaces it\n",
        )
        assert run(*words, "-o", out, "-f").stdout == ""
        assert out.read_text() == run(*words).stdout


def test_a_level_by_its_name(folder: Path, tmp_path: Path) -> None:
    net = folder / "net.safetensors"
    with elsa.open(net) as file:
        for name, number in (("95%", 1), ("80%", 3), ("dense", "dense"), ("2", 2)):
            out = tmp_path / f"{number}.safetensors"
            assert run("elsa-extract", net, "--level", name, "-o", out).returncode == 0
            assert load_file(out)["layer"].tobytes() == file.tensor("layer", number).tobytes()
    model = ["elsa-export", net, "--onnx", folder / "net.onnx"]
    for name in ("90%", "2"):
        assert run(*model, "--level", name, "-o", tmp_path / f"{name}.onnx").returncode == 0
    assert (tmp_path / "90%.onnx").read_bytes() == (tmp_path / "2.onnx").read_bytes()
    unknown = run("elsa-extract", net, "--level", "85%", "-o", tmp_path / "x")
    assert unknown.stderr == (
        f"error: {net}: no level '85%', expected 1..3, 'dense' or a name: 95%, 90%, 80%\n"
    )


@pytest.mark.parametrize(
    ("name", "shell"),
    [*((name, "bash") for name in ("", *COMMANDS, "train")), ("pack", "zsh"), ("pack", "fish")],
)
def test_completion_scripts_are_made(name: str, shell: str) -> None:
    program = f"elsa-{name}" if name else "elsa"
    variable = f"_{program.upper().replace('-', '_')}_COMPLETE"
    done = run_script(program, **{variable: f"{shell}_source"})
    assert done.returncode == 0
    assert f"{variable}={shell}_complete" in done.stdout
    assert program in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("elsa pa", ["pack"]),
        ("elsa pack --spars", ["--sparsities"]),
        ("elsa export --fold", ["--fold-batch-norm"]),
        ("elsa-verify --js", ["--json"]),
        ("elsa-extract NET --level 9", ["95%", "90%"]),
        ("elsa export NET -l de", ["dense"]),
        ("elsa-extract nothing --level 9", []),
    ],
)
def test_words_are_completed(words: str, expected: list[str], folder: Path) -> None:
    words = words.replace("NET", str(folder / "net.safetensors"))
    program = words.split()[0]
    done = run_script(
        program,
        COMP_WORDS=words,
        COMP_CWORD=str(len(words.split()) - 1),
        **{f"_{program.upper().replace('-', '_')}_COMPLETE": "bash_complete"},
    )
    assert done.stdout.split() == [f"plain,{word}" for word in expected]


def test_advice_is_in_the_words_of_the_command(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    out = tmp_path / "out"
    for words, advice in {
        PACK: "; give one of --sparsities, --level and --counters",
        f"{PACK} --sparsities 9 --levels 1": "; --levels needs --counters",
        f"{PACK} --sparsities 9 --per-level bias": "; --per-level needs --level",
        f"{PACK} --sparsities 2:4": "; --exclude layer leaves it out",
        f"{PACK} --sparsities 1:2 --axis 7": "; --exclude layer leaves it out",
        f"{PACK} --level other.safetensors": "; --per-level bias stores one for each level",
        "elsa-pack integers.safetensors --sparsities 9 -o OUT": "; --include names others",
        "elsa-verify dense.safetensors": "; elsa-pack makes an ELSA file of a checkpoint",
        f"{EXPORT} --max-size 1": "; --sparse may be smaller",
    }.items():
        done = run(*words.replace("OUT", str(out)).split())
        assert done.stderr.endswith(f"{advice}\n"), done.stderr
