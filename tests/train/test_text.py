"""Text: windows leave no byte out, the model sees no future, and a run goes from file to file."""

import hashlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from internals import BadData, BadRecipe, Output, Reporter, Run, size, train

import elsa_format
from elsa_train import Level, Recipe, models, read_recipe
from elsa_train.data import load
from elsa_train.data.text import CONTEXT, SHORTEST, TextData

TEXT = b"".join(b"%d green bottles hanging on the wall, " % n for n in range(600))
TINY = ["--width", "32", "--batch-size", "8", "--train-images", "64", "--test-images", "5"]
SHORT = ["--epochs", "1", "--sparsify-epochs", "1", "--densify-epochs", "0.5", "--plot", "none"]


def test_every_byte_to_test_on_is_a_label_once_and_none_is_trained_on():
    text = np.random.default_rng(0).bytes(SHORTEST)
    data = TextData(text)
    tested = len(text) - (end := len(text) - round(0.1 * len(text)))
    windows, labels = data.batch("test", np.arange(data.size("test")), 0)
    assert tested - CONTEXT <= labels.size < tested
    assert bytes(windows.ravel()) == text[end : end + labels.size]
    assert bytes(labels.astype(np.uint8).ravel()) == text[end + 1 : end + 1 + labels.size]
    for seed in range(20):
        windows, labels = data.batch("train", np.arange(data.size("train")), seed)
        first = text.index(bytes(windows[0]))
        assert first < CONTEXT
        assert bytes(labels.astype(np.uint8).ravel()) == text[first + 1 : first + 1 + labels.size]
        assert first + 1 + labels.size <= end


def test_pythons_own_text_is_there_and_named():
    data = load("text")
    assert data.identity["text_bytes"] > 300_000
    assert len(data.identity["text_sha256"]) == 64
    assert data.size("train") > 8 * data.size("test") > 0


@pytest.mark.parametrize("content", [b"", b"short", b"x" * (SHORTEST - 1)])
def test_too_little_text_is_refused(tmp_path, content):
    path = tmp_path / "little.txt"
    path.write_bytes(content)
    with pytest.raises(BadData, match=f"little.txt: found {len(content)} bytes, expected at least"):
        load("text", path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dataset": "text", "model": "digits"}, "'digits' does not go with dataset 'text'"),
        ({"dataset": "digits", "model": "gpt"}, "'gpt' does not go with dataset 'digits'"),
        ({"text": "book.txt"}, "can't use"),
    ],
)
def test_text_goes_with_its_own_model(values, reason):
    with pytest.raises(BadRecipe, match=reason):
        Recipe(**values)


def test_the_model_sees_no_future():
    model = models.GPT(width=32, layers=2)
    text = jax.random.randint(jax.random.key(0), (1, 50), 0, 256)
    variables = jax.jit(model.init)(jax.random.key(1), text)
    logits = jax.jit(model.apply)
    one, other = logits(variables, text), logits(variables, text.at[0, 30].add(1))
    np.testing.assert_array_equal(one[0, :30], other[0, :30])
    assert jnp.all(jnp.any(one[0, 30:] != other[0, 30:], axis=-1))


def test_the_recipe_has_every_scope_and_its_size_is_the_documented_one(tmp_path):
    for scope, sparsity in {"global": 74, "uniform": 74, "nm": 72}.items():
        recipe = read_recipe("text-gpt", {"scope": scope})
        run = Run(recipe, 0, Output(tmp_path), Reporter(None))
        params = run.trainer.like.params
        pruned = run.scope.budgets(params, run.levels[0])
        total = sum(run.scope.budgets(params, Level("dense", 0.0)))
        assert size(params) == 238_976
        assert 100 * (total - sum(pruned)) / size(params) == pytest.approx(sparsity, abs=1)


def run(*words):
    """Return what the command says, and its code; whatever else it raises."""
    found = CliRunner().invoke(train, ["text-gpt", *words])
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    return found.exit_code, found.output


@pytest.mark.parametrize("method", ["sequential", "joint"])
def test_a_text_of_ones_own(tmp_path, method):
    text = tmp_path / "bottles.txt"
    text.write_bytes(TEXT)
    folder = tmp_path / "run"
    options = [*TINY, *SHORT, "--text", str(text), "--method", method, "-o", str(folder)]
    code, said = run(*options)
    assert code == 0, said
    assert "bytes/s" in said
    assert "ELSA, nats" in (folder / "table.md").read_text()
    assert "ELSA, bits per byte | ELSA, perplexity |" in (folder / "table.md").read_text()
    rows = json.loads((folder / "seed-0" / "results.json").read_text())["rows"]
    model = folder / "seed-0" / "model.safetensors"
    with elsa_format.open(model) as file:
        settings = json.loads(file.metadata["elsa_train"])
        assert settings["text_sha256"] == hashlib.sha256(TEXT).hexdigest()
        assert settings["text_bytes"] == len(TEXT)
        assert str(tmp_path) not in json.dumps(dict(file.metadata))
        measures = [level.metrics for level in file.levels] + [file.profile.dense_metrics]
    for row, measured in zip(rows, measures, strict=True):
        assert row["elsa"] == measured["loss"] < math.log(256) + 1
        assert measured["bits_per_byte"] == measured["loss"] / math.log(2)
        assert measured["perplexity"] == math.exp(measured["loss"])
    # The same command leaves a finished run alone; another text is another run.
    code, said = run(*options)
    assert code == 0, said
    text.write_bytes(TEXT[1:])
    code, said = run(*options)
    assert (code, "a run on other data (text_bytes was" in said) == (2, True), said


@pytest.mark.parametrize("name", ["none.txt", ".", "/dev/zero"])
def test_a_text_that_is_not_there(tmp_path, name):
    expected = f"error: {tmp_path / name}: no such file\n"
    assert run("--text", str(tmp_path / name)) == (1, expected)
