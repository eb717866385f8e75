"""`elsa-train`: recipes, options, tables, plots; light until it works."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from internals import BadRecipe, _report, _run, import_line, load_network, recipe_names, train
from test_resume import ARGUMENTS

import elsa_format
from elsa_format.cli import install_command
from elsa_train import Scope, parse_levels, read_recipe
from elsa_train.models import build

BIN = Path(sys.executable).parent
CLASSES = {"cifar100": 100, "imagefolder": 1000}


@pytest.mark.parametrize("name", recipe_names())
@pytest.mark.parametrize("scope", ["global", "uniform", "nm"])
def test_bundled_recipes_can_be_trained(name, scope):
    if name == "cifar10-stress" and scope == "nm":
        with pytest.raises(BadRecipe, match="has no scope"):
            read_recipe(name, {"scope": scope})
        return
    recipe = read_recipe(name, {"scope": scope})
    assert recipe.summary
    model = build(recipe.model, num_classes=CLASSES.get(recipe.dataset, 10), width=recipe.width)
    shapes = {"digits": (1, 8, 8, 1), "fashion-mnist": (1, 28, 28, 1), "text-gpt": (1, 128)}
    dtype = jnp.int32 if recipe.dataset == "text" else jnp.float32
    inputs = jnp.zeros(shapes.get(name, (1, 32, 32, 3)), dtype)
    params = jax.eval_shape(model.init, jax.random.key(0), inputs)["params"]
    levels = parse_levels(recipe.levels)
    bits = Scope(scope, recipe.prune, recipe.exclude, recipe.axis).check(params, levels)
    assert bits == (6 if name == "cifar10-stress" else 2)


def test_help_is_light_and_lists_recipes_and_values():
    code = (
        f"import sys; {import_line('train')}\n"
        "try: train(['--help'])\n"
        "finally: assert not {'jax', 'flax', 'sklearn', 'matplotlib'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert all(name in found.stdout for name in recipe_names())
    one = CliRunner().invoke(train, ["digits", "--help"])
    assert "--densify-factor" in one.output
    assert "--joint-shares" in one.output


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["digits", "--levels", "80,90"], "must fall"),
        (["digits", "--scope", "nm", "--levels", "1:16,1:8", "--width", "8"], "exclude"),
        (["digits", "--batch-size", "5000"], "exceeds"),
        (["digits", "--model", "speedyresnet"], "can't take images"),
        (["digits", "--bits", "1"], "counter bits"),
        (["digits", "--prune", "nothing"], "no tensor matches"),
        (["digits", "--dataset", "os:path"], "class or function"),
        (["digits", "--dataset", "nowhere:load"], "nowhere"),
        (["digits", "--seed", "-1"], "--seed"),
        (["digits", "-o", "\udcff"], "not UTF-8"),
        (["digits", "-o", "-"], "standard output"),
        (["digits", "--processes", "2"], "--coordinator"),
        (["digits", "--coordinator", "here", "--processes", "2"], "host:port"),
        (["digits", "--coordinator", "here:1", "--processes", "2", "--process", "2"], "from 0"),
        (["cifar10-speedyresnet"], "--data-dir"),
        (["nothing"], "No such command"),
    ],
)
def test_what_cannot_be_trained_ends_with_a_reason(words, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(train, words)
    assert found.exit_code == 2
    assert reason in found.output
    assert "Traceback" not in found.output
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    words = ["digits", "--out", str(folder), *ARGUMENTS, "--seeds", "2", "--reference"]
    words += ["--equal-epochs", "--levels", "80", "--plot", "svg", "--train-images", "320"]
    found = CliRunner().invoke(train, words, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return folder, words, found.output


def test_a_run_leaves_table_plot_metrics_and_files(two_seeds):
    folder, _, output = two_seeds
    table = (folder / "table.md").read_text()
    assert table in output
    assert table.startswith(
        "| level | actual sparsity | ELSA | reference | reference, equal epochs |"
    )
    assert table.count("±") == 6
    for path in ("accuracy.svg", "seed-0/curves.svg", "seed-1/curves.svg"):
        assert (folder / path).read_text().startswith("<?xml")
    lines = [json.loads(x) for x in (folder / "seed-1" / "metrics.jsonl").read_text().splitlines()]
    assert {"phase", "step", "loss", "accuracy", "sparsity", "images_per_second"} <= lines[0].keys()
    assert any("frozen" in line for line in lines)
    for seed in (0, 1):
        elsa_format.verify(folder / f"seed-{seed}" / "model.safetensors")


def test_a_finished_run_is_not_trained_again(two_seeds):
    folder, words, _ = two_seeds
    before = (folder / "seed-0" / "model.safetensors").stat().st_mtime_ns
    again = CliRunner().invoke(train, words)
    assert (folder / "table.md").read_text() in again.output
    assert (folder / "seed-0" / "model.safetensors").stat().st_mtime_ns == before


def test_without_matplotlib_only_the_plot_is_missing(two_seeds, monkeypatch):
    folder, words, _ = two_seeds
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    again = CliRunner().invoke(train, words)
    assert again.exit_code == 0, again.output
    assert (folder / "table.md").read_text() in again.output
    advice = f"no plot: matplotlib is not installed; run: {install_command('plot')}"
    assert advice in again.output
    quiet = CliRunner().invoke(train, [*words, "-q"])
    assert (quiet.exit_code, quiet.output) == (0, "")


def test_the_list_of_recipes_is_light():
    code = (
        f"import sys; {import_line('train')}\n"
        "try: train(['list'])\n"
        "finally: assert not {'jax', 'flax', 'sklearn', 'matplotlib'} & set(sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert all(f"{name} " in found.stdout for name in recipe_names())
    assert "CIFAR-10 (binary archive), SpeedyResNet, three levels; needs --data-dir" in found.stdout
    known = json.loads(CliRunner().invoke(train, ["list", "--json"]).output)
    assert known["digits"]["levels"] == "95,90,80"


def test_without_jax_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    found = CliRunner().invoke(train, ["digits"])
    assert found.exit_code == 1
    assert found.output == f"error: training needs jax; run: {install_command('train')}\n"


def test_without_jaxpruner_it_says_where_it_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "jaxpruner", None)
    found = CliRunner().invoke(train, ["digits", "--updater", "global_magnitude"])
    assert found.exit_code == 1
    assert "jaxpruner is not installed" in found.output
    assert list(tmp_path.iterdir()) == []


def test_more_steps_than_a_device_can_count_are_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_run, "MOST", 400)
    found = CliRunner().invoke(train, ["digits"])
    assert found.exit_code == 2
    assert found.output == "error: dense: 420 steps, expected at most 400\n"
    assert list(tmp_path.iterdir()) == []


def test_what_devices_cannot_do_is_one_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand more")

    monkeypatch.setattr(_run, "run_seed", full)
    found = CliRunner().invoke(train, ["digits"])
    assert found.exit_code == 1
    assert found.output == "error: RESOURCE_EXHAUSTED: Out of memory\n"


@pytest.mark.parametrize("words", [["--version"], ["-h"], ["digits", "-h"], ["recalibrate", "-h"]])
def test_options_that_every_command_has(words):
    found = CliRunner().invoke(train, words)
    assert found.exit_code == 0
    if words == ["--version"]:
        assert elsa_format.__version__ in found.output
    if len(words) == 2:
        assert all(
            option in found.output
            for option in ("-o, --output", "-q, --quiet", "--json", "-f, --force", "--dataset")
        )
        assert not any(former in found.output for former in ("--out ", "--restart", "--data "))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["di"], {"digits"}),
        (["my"], {"my.toml"}),
        (["digits", "--densify-f"], {"--densify-factor"}),
        (["digits", "--scope", ""], {"global", "uniform", "nm"}),
        (["my.toml", "--model", "res"], {"resnet50"}),
        (["digits", "--dataset", "cifar"], {"cifar10", "cifar100"}),
        (["recalibrate", "net.safetensors", "--dataset", "d"], {"digits"}),
        (["bad.toml", "--ep"], set()),
    ],
)
def test_completion(words, expected, tmp_path):
    (tmp_path / "my.toml").write_text("")
    (tmp_path / "bad.toml").write_text("=")
    environment = {
        **os.environ,
        "_ELSA_TRAIN_COMPLETE": "bash_complete",
        "COMP_WORDS": shlex.join(["elsa-train", *words]),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [BIN / "elsa-train"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert {line.partition(",")[2] for line in done.stdout.split()} == expected
    assert done.stderr == ""


def test_own_data_is_found_in_the_current_directory(tmp_path):
    (tmp_path / "mydata.py").write_text("def load(data_dir): pass")
    words = [BIN / "elsa-train", "digits", "--dataset"]
    for name, reason in (("load", "NoneType has no 'num_classes'"), ("lost", "has no 'lost'")):
        done = subprocess.run(
            [*words, f"mydata:{name}"], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode in (2, 3)
        assert done.stderr.startswith(f"error: dataset 'mydata:{name}': ")
        assert reason in done.stderr
        assert not (tmp_path / "runs").exists()


def test_recalibrate_replaces_one_levels_statistics_only(two_seeds, train_tiny, tmp_path):
    run, _, _ = train_tiny("global", "float32")
    source, out = run.output.model, tmp_path / "out.safetensors"
    words = ["recalibrate", str(source), "--level", "2", "--data", "digits", "-o", str(out)]
    found = CliRunner().invoke(train, [*words, "--images", "512"], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    elsa_format.verify(out)
    with elsa_format.open(source) as before, elsa_format.open(out) as after:
        assert after.levels[0].digest == before.levels[0].digest
        assert after.levels[1].digest != before.levels[1].digest
        assert after.levels[2].metrics == before.levels[2].metrics
        assert not after.levels[1].metrics
        for level in (1, 2, 3, "dense"):
            old, new = before.load(level), after.load(level)
            for name in old:
                changed = old[name].tobytes() != new[name].tobytes()
                assert changed == (level == 2 and name in before.per_level), (level, name)
        for name in before.per_level:
            if name.endswith("/var"):
                assert np.all(after.tensor(name, 2) >= 0)
    accuracy = run.trainer.evaluate(load_network(out, 2, run.trainer))["accuracy"]
    assert accuracy > 0.5


def test_recalibrate_says_which_levels_there_are(train_tiny, tmp_path):
    run, _, _ = train_tiny("global", "float32")
    words = ["recalibrate", str(run.output.model), "--level", "7", "--data", "digits"]
    found = CliRunner().invoke(train, [*words, "-o", str(tmp_path / "x.safetensors")])
    assert found.exit_code == 2
    assert "95%, 90%, 80%" in found.output


def test_table_shows_mean_and_deviation():
    rows = [
        [_report.Row("90%", 0.898, 10, a, r), _report.Row("dense", 0.0, 99, 0.98)]
        for a, r in ((0.9, 0.8), (0.92, 0.8))
    ]
    lines = _report.markdown(_report.cells(rows)).splitlines()
    assert lines[2] == "| 90% | 89.8000% | 91.00 ± 1.00 | 80.00 ± 0.00 |"
    assert lines[3] == "| dense |  | 98.00 ± 0.00 |  |"


@pytest.mark.parametrize("url", ["gs://bucket/run", "s3://bucket/run", "file:///tmp/run"])
def test_an_object_store_is_no_folder(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(train, ["digits", "-o", url])
    assert found.exit_code == 2
    assert f"--output {url}: checkpoints need a folder" in found.output
    assert os.listdir(tmp_path) == []


def test_hosts_that_jax_finds_by_itself(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *words: asked.append(words))
    words = ["digits", "-o", str(tmp_path / "run"), "--batch-size", "5000", "--distributed"]
    assert CliRunner().invoke(train, words).exit_code == 2  # too large a batch, seen later
    assert asked == [()]
    found = CliRunner().invoke(train, [*words, "--coordinator", "here:1234"])
    assert "leave out --coordinator" in found.output

    def fail():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    found = CliRunner().invoke(train, words)
    assert found.exit_code == 1
    assert "--distributed: JAX finds no hosts here (coordinator_address" in found.output
