"""Perplexity of a text at every level of a language model in transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from click.testing import CliRunner
from elsa_converters.torch import InvalidData, evaluate
from elsa_converters.transformers import ElsaConfig, evaluate_text, use_level
from internals import bench
from test_transformers import make, state
from tokenizers import Tokenizer, models, pre_tokenizers

import elsa_format

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXT = "a nested network keeps few of its weights at first and more of them later\n" * 2
SIZE = 16
"""Tokens that the model takes."""


def add_tokenizer(folder: Path, **special: Any) -> None:
    """A token for each letter, and one for all else."""
    words = {letter: number for number, letter in enumerate(["<s>", "?", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@pytest.fixture(params=["gpt2", "mixtral"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A packed language model; experts of the second one are merged when it is loaded."""
    packed = make(request.param, tmp_path, torch.float32)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"max_position_embeddings": SIZE}))
    add_tokenizer(packed)
    (tmp_path / "text.txt").write_text(TEXT)
    return packed


def losses_of(folder: Path, level: Any) -> tuple[float, int]:
    """The loss of each token of each part, by another way."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=ElsaConfig(level=level)
    )
    tokens = torch.tensor([LETTERS.find(c) + 2 if c in LETTERS else 1 for c in TEXT])
    losses, parts = [], tokens.split(SIZE)
    for part in parts:
        with torch.no_grad():
            scores = model(part[None]).logits[0].log_softmax(-1)
        losses += [-float(scores[n, token]) for n, token in enumerate(part[1:])]
    return sum(losses) / len(losses), len(parts)


def test_every_level(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    found = evaluate_text(folder, folder.parent / "text.txt")
    assert list(found) == [1, 2, "dense"]
    for level, metrics in found.items():
        loss, parts = losses_of(folder, level)
        assert metrics["loss"].value == pytest.approx(loss, rel=1e-4)
        assert metrics["perplexity"].value == pytest.approx(math.exp(loss), rel=1e-4)
        assert (metrics["perplexity"].better, metrics["loss"].samples) == ("lower", parts)
    assert (folder / "model.safetensors").read_bytes() == weights
    first = evaluate_text(folder, folder.parent / "text.txt", limit=2)
    assert first["dense"]["loss"].samples == 2


def test_the_command(folder: Path) -> None:
    words = [str(folder), "--text", str(folder.parent / "text.txt")]
    result = CliRunner().invoke(bench, [*words, "--json", "-q"])
    assert result.exit_code == 0, result.output
    found = evaluate_text(folder, folder.parent / "text.txt")
    for row, (level, metrics) in zip(json.loads(result.stdout), found.items(), strict=True):
        assert row["level"] == level
        assert row["metrics"]["perplexity"]["value"] == metrics["perplexity"].value
    result = CliRunner().invoke(bench, [*words, "-q"])
    assert result.stdout.split()[:4] == ["level", "sparsity", "loss", "perplexity"]
    assert [line.split()[:1] for line in result.stdout.splitlines()[1:4]] == [
        ["1"],
        ["2"],
        ["dense"],
    ]
    assert result.stderr == ""


def test_record(folder: Path) -> None:
    """Loaded by its metric then, the model is as good as that."""
    text = folder.parent / "text.txt"
    found = evaluate_text(folder, text)
    result = CliRunner().invoke(bench, [str(folder), "--text", str(text), "--record", "-q"])
    assert result.exit_code == 0, result.output
    assert evaluate_text(folder, text) == found
    with elsa_format.open(folder) as file:
        assert file.levels[0].metrics["perplexity"] == found[1]["perplexity"].value
        assert file.profile.metrics["perplexity"].better == "lower"
        assert file.choose(max={"perplexity": found[1]["perplexity"].value}) == 1


def test_a_model_that_is_loaded_is_as_it_was(folder: Path) -> None:
    """What was trained meanwhile, and the level it is at, are nobody's business."""
    model = hf.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=ElsaConfig(level=2)
    ).train()
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1)
    before = state(model)
    batches = [{"input_ids": torch.arange(24).reshape(2, 12)}]
    found = evaluate(model, None, batches, "perplexity")
    assert list(found) == [1, 2, "dense"]
    assert state(model) == before
    assert model.training
    use_level(model, 1)
    with torch.no_grad():
        expected = model.eval()(**batches[0], labels=batches[0]["input_ids"]).loss
    assert found[1]["loss"].value == pytest.approx(float(expected), rel=1e-4)


def test_a_token_begins_every_part_where_the_tokenizer_says_so(tmp_path: Path) -> None:
    """So that the first token of the text is predicted as well."""
    packed = make("llama", tmp_path, torch.float32)
    (tmp_path / "text.txt").write_text("ab")
    add_tokenizer(packed, bos_token="<s>")
    tokenizer = json.loads((packed / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (packed / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = hf.AutoModelForCausalLM.from_pretrained(packed, quantization_config=ElsaConfig(1))
    ids = torch.tensor([[0, 2, 3]])
    with torch.no_grad():
        expected = float(model(ids, labels=ids).loss)
    found = evaluate_text(packed, tmp_path / "text.txt")
    assert found[1]["loss"].value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "text.txt: holds no text"),
        (b"\n \n", "text.txt: holds no text"),
        (b"\xff\xfe", "text.txt: is not UTF-8 text"),
        (b"a", "text.txt: holds 1 tokens, expected 2 or more"),
        (None, "No such file"),
    ],
)
def test_what_is_no_text(folder: Path, text: bytes | None, words: str, monkeypatch: Any) -> None:
    """Said before the weights are loaded."""
    path = folder.parent / "text.txt"
    path.unlink() if text is None else path.write_bytes(text)
    monkeypatch.setattr(hf.AutoModelForCausalLM, "from_pretrained", None)
    result = CliRunner().invoke(bench, [str(folder), "--text", str(path)])
    assert result.exit_code in (1, 3)
    assert words in result.output
    assert result.output.count("error: ") == 1


def test_what_is_no_language_model(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidData, match="AutoTokenizer: "):
        evaluate_text(folder, text)
    add_tokenizer(folder, additional_special_tokens=[f"<{n}>" for n in range(100)])
    text.write_text("a <99>")
    with pytest.raises(InvalidData, match="the model has 64; it is another model's tokenizer"):
        evaluate_text(folder, text)
    vit = make("vit", tmp_path / "other", torch.float32)
    add_tokenizer(vit)
    with pytest.raises(InvalidData, match="AutoModelForCausalLM: "):
        evaluate_text(vit, text)


def test_the_levels_that_were_fetched(folder: Path, tmp_path: Path) -> None:
    elsa_format.ship(folder, tmp_path / "ship")
    elsa_format.fetch(tmp_path / "ship", tmp_path / "device", level=1)
    expected = evaluate_text(folder, tmp_path / "text.txt")[1]
    assert evaluate_text(tmp_path / "device", tmp_path / "text.txt") == {1: expected}
