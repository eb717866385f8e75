"""Models and metrics of a user's own, named on the command line, and measuring files again."""

import json

import pytest
from click.testing import CliRunner
from internals import Checkpoints, TensorBoard, scalars, train

import elsa_format
from elsa_train import read_recipe

ARGUMENTS = ["--levels", "90", "--epochs", "1", "--sparsify-epochs", "1", "--densify-epochs", "0"]
ARGUMENTS += ["--train-images", "448", "--test-images", "100", "--plot", "none", "-q"]
MODULE = """
import flax.linen as nn

entries = []


class Net(nn.Module):
    num_classes: int
    width: int = 16

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(self.width)(x.reshape(len(x), -1)))
        return nn.Dense(self.num_classes)(x)


def hook(recipe, seed):
    return lambda step, entry: entries.append((recipe["model"], seed, step, entry))


def broken(num_classes):
    raise ValueError("no such network")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Train a network of one's own, with every way out for its metrics."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "ownmodel.py").write_text(MODULE)
    save = Checkpoints.save

    def saved(self, progress, phase=None):
        with (folder / "saved").open("a") as file:
            print(progress.done, phase and phase.step, file=file)
        save(self, progress, phase)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(Checkpoints, "save", saved)
        words = ["digits", *ARGUMENTS, "--model", "ownmodel:Net", "-o", "run", "--tensorboard"]
        words += ["--metrics-hook", "ownmodel:hook", "--checkpoint-minutes", "0.0001"]
        ran = CliRunner().invoke(train, words)
        assert ran.exit_code == 0, ran.output
    return folder


def test_a_model_of_ones_own_is_trained_and_measured_again(folder, monkeypatch):
    monkeypatch.chdir(folder)
    path = "run/seed-0/model.safetensors"
    with elsa_format.open(path) as file:
        wanted = [dict(file.levels[0].metrics), dict(file.profile.dense_metrics)]
    words = ["evaluate", path, "--limit", "100", "--json"]
    refused = CliRunner().invoke(train, words)
    assert refused.exit_code == 3
    assert "never run: give --model" in refused.output
    found = CliRunner().invoke(train, [*words, "--model", "ownmodel:Net"])
    assert found.exit_code == 0, found.output
    rows = json.loads(found.output)["levels"]
    assert [row["level"] for row in rows] == [1, "dense"]
    for row, metrics in zip(rows, wanted, strict=True):
        assert row["metrics"] == pytest.approx(metrics, rel=1e-4)


def test_a_level_is_measured_by_number_and_by_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = ["evaluate", "run/seed-0/model.safetensors", "--model", "ownmodel:Net"]
    found = CliRunner().invoke(train, [*words, "--level", "1", "--level", "90%", "--limit", "64"])
    assert found.exit_code == 0, found.output
    head, *rows = found.output.splitlines()
    assert head.split() == ["level", "name", "accuracy", "loss"]
    assert {tuple(row.split()[:2]) for row in rows} == {("1", "90%")}


def test_metrics_reach_a_hook_and_tensorboard_as_they_reach_the_file(folder):
    import ownmodel

    lines = (folder / "run/seed-0/metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry for *_, entry in ownmodel.entries] == entries
    steps = [step for _, _, step, _ in ownmodel.entries]
    assert steps == sorted(steps)
    assert {(model, seed) for model, seed, *_ in ownmodel.entries} == {("ownmodel:Net", 0)}
    (events,) = (folder / "run/seed-0/tensorboard").iterdir()
    content = events.read_bytes()
    for tag in {tag for entry in entries for tag, _ in scalars(entry)}:
        assert tag.encode() in content


def test_events_are_those_that_tensorboard_reads(tmp_path):
    """The record's framing, checked against its definition; the checksum of RFC 3720's example."""
    TensorBoard(tmp_path)(7, {"phase": "dense", "step": 7, "loss": 0.5})
    (path,) = tmp_path.iterdir()
    content, records = path.read_bytes(), []
    while content:
        length = int.from_bytes(content[:8], "little")
        records.append(content[12 : 12 + length])
        content = content[16 + length :]
    assert records[0].endswith(b"brain.Event:2")
    assert b"\x10\x07" in records[1]
    assert records[1].endswith(b"dense/loss\x15\x00\x00\x00?")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--model", "ownmodel:Other"], "has no 'Other'"),
        (["--model", "missing:Net"], "No module named 'missing'"),
        (["--model", "ownmodel:broken"], "no such network"),
        (["--model", "ownmodel:entries"], "expected a class or function"),
        (["--model", "nothing"], "expected one of"),
        (["--metrics-hook", "nothing"], "not module:name"),
    ],
)
def test_what_is_not_a_model_is_said(folder, words, reason, monkeypatch):
    monkeypatch.chdir(folder)
    found = CliRunner().invoke(train, ["digits", *ARGUMENTS, *words, "-o", "other"])
    assert found.exit_code == 2
    assert reason in found.output


def test_a_file_names_no_code(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('model = "ownmodel:Net"\n')
    with pytest.raises(Exception, match="would run code"):
        read_recipe(str(path))


def test_runs_are_saved_by_time(folder):
    """Long before the 500 steps after which they are saved anyway."""
    within = [line for line in (folder / "saved").read_text().splitlines() if "None" not in line]
    assert "-1 1" in within
    assert "0 1" in within
