"""Model directories by calibration: `from_pretrained` gives each level as it was measured."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from elsa_converters.torch import InvalidData
from elsa_converters.transformers import ElsaConfig
from internals import HELD, spread
from safetensors.torch import load_file, save_file
from test_transformers_text import LETTERS, add_tokenizer

import elsa_format
from elsa_format import ElsaError, InvalidOption

SIZES = {"vocab_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16}
TEXT = {**SIZES, "intermediate_size": 24, "max_position_embeddings": 32}
LLAMA = {**TEXT, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 1}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=5)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32,
            bos_token_id=0, eos_token_id=1,
        )
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**LLAMA, num_local_experts=2, num_experts_per_tok=1)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, decoder_start_token_id=0)),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=40, d_model=16, encoder_layers=1, decoder_layers=1,
            max_position_embeddings=32, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=24, decoder_ffn_dim=24, pad_token_id=1, bos_token_id=0, eos_token_id=2,
            decoder_start_token_id=2, forced_eos_token_id=None,
        )
    ),
    "albert": lambda: hf.AlbertModel(hf.AlbertConfig(**TEXT, embedding_size=8)),
}  # fmt: skip
LENGTH, SAMPLES = 8, 32


def dense(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    place = folder / name
    MODELS[name]().to(dtype).save_pretrained(place)
    add_tokenizer(place, pad_token="?")
    return place


def lines(count: int = SAMPLES) -> list[str]:
    """Texts of letters, some shorter than others, none of which all letters are in."""
    random = np.random.default_rng(0)
    return ["".join(random.choice(list(LETTERS[:20]), 5 + n // 2 % 4)) for n in range(count)]


def samples(folder: Path) -> Path:
    path = folder / "samples.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in lines()))
    return path


def pack(place: Path, out: Path, given: Any, **options: Any) -> elsa_format.PackReport:
    options = {"sparsities": [75, 50], "length": LENGTH} | options
    return elsa_format.pack(place, out, calibrate=given, **options)


def encoded(name: str, size: int = 2) -> list[dict[str, torch.Tensor]]:
    """The batches of what is held back, by another way."""
    words, batches = lines(), []
    if name == "mixtral":  # batches of texts of one length
        words.sort(key=lambda word: min(len(word), LENGTH))
    for start in range(0, len(words), size):
        some = [word[:LENGTH] for word in words[start : start + size]]
        longest = max(map(len, some))
        ids = [[LETTERS.index(c) + 2 for c in w] + [1] * (longest - len(w)) for w in some]
        mask = [[1] * len(w) + [0] * (longest - len(w)) for w in some]
        batch = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
        if name in ("t5", "bart"):
            first = torch.full_like(batch["input_ids"][:, :1], 2 if name == "bart" else 0)
            batch["decoder_input_ids"] = torch.cat([first, batch["input_ids"][:, :-1]], 1)
            one = torch.ones_like(first)
            mask = torch.cat([one, batch["attention_mask"][:, :-1]], 1)
            batch["decoder_attention_mask"] = mask
        batches.append(batch)
    return [batches[at] for at in spread(range(len(batches)), HELD)]


def outputs(name: str, place: Path, level: Any = None) -> np.ndarray:
    """What a level gives for what is held back."""
    config = {} if level is None else {"quantization_config": ElsaConfig(level=level)}
    model = type(MODELS[name]()).from_pretrained(place, dtype="auto", **config)
    experts = name == "mixtral"
    if experts:
        model.set_experts_implementation("eager")
    found = []
    for batch in encoded(name):
        with torch.no_grad():
            output = model(**batch)
        if name == "bert":
            found.append(output.logits)
            continue
        rows = output.last_hidden_state if name == "albert" else output.logits
        mask = batch.get("decoder_attention_mask", batch["attention_mask"]).bool()
        both = mask & batch["attention_mask"].bool()  # the lengths are the same
        found.append(rows[both])
    return torch.cat(found).float().numpy()


@pytest.mark.parametrize("name", MODELS)
def test_levels_give_the_outputs_that_were_measured(name: str, tmp_path: Path) -> None:
    place, out = dense(name, tmp_path), tmp_path / "packed"
    content = {path.name: path.read_bytes() for path in place.iterdir()}
    report = pack(place, out, samples(tmp_path))
    assert {path.name: path.read_bytes() for path in place.iterdir()} == content
    assert {path.name for path in out.iterdir()} == set(content)
    original = outputs(name, place)
    told = [*(level.metrics for level in report.profile.levels), report.profile.dense_metrics]
    for level, metrics in zip((1, 2, "dense"), told, strict=True):
        found = outputs(name, out, level)
        error = np.linalg.norm(found - original) / np.linalg.norm(original)
        assert metrics["relative_error"] == pytest.approx(error, rel=1e-3, abs=1e-6)
        if name != "albert":
            same = np.mean(found.argmax(-1) == original.argmax(-1))
            assert metrics["agreement"] == pytest.approx(same)
    assert told[0]["relative_error"] > told[2]["relative_error"]
    own = set(load_file(place / "model.safetensors"))
    assert {*report.nested, *report.profile.per_level} <= own


OTHERS: dict[str, Callable[[], Any]] = {
    "electra": lambda: hf.ElectraForPreTraining(hf.ElectraConfig(**TEXT, embedding_size=8)),
    "deberta": lambda: hf.DebertaV2ForSequenceClassification(
        hf.DebertaV2Config(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])
    ),
    "xlnet": lambda: hf.XLNetLMHeadModel(
        hf.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=24)
    ),
}
"""A number for each token, a layer that multiplies a parameter, texts of any length."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_models(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, name, OTHERS[name])
    report = pack(dense(name, tmp_path), tmp_path / "packed", lines())
    assert len(report.nested) >= 2
    assert report.profile.dense_metrics["relative_error"] < 0.1
    assert ("agreement" in report.profile.metrics) == (name != "electra")


def test_what_is_nested(tmp_path: Path) -> None:
    """Layers, and no heads or embeddings unless that is asked; biases where there are some."""
    place, given = dense("gpt2", tmp_path), samples(tmp_path)
    report = pack(place, tmp_path / "packed", given, sparsities="2:4")
    assert len(report.nested) == 4
    assert set(report.profile.per_level) == {n.replace("weight", "bias") for n in report.nested}
    assert report.shared["transformer.wpe.weight"] == "position"
    with elsa_format.open(tmp_path / "packed") as file:
        weight = file.tensor("transformer.h.0.attn.c_attn.weight", 1)
    assert ((weight.T.reshape(-1, 4) != 0).sum(-1) == 2).all()

    place = dense("llama", tmp_path)
    report = pack(place, tmp_path / "llama-packed", given, nest_all=True)
    assert "lm_head.weight" in report.nested
    assert report.profile.per_level == ()
    assert "is not called" in report.shared["model.embed_tokens.weight"]


def test_experts_are_nested_as_they_are_stored(tmp_path: Path) -> None:
    place, out = dense("mixtral", tmp_path), tmp_path / "packed"
    report = pack(place, out, samples(tmp_path))
    experts = [name for name in report.nested if ".experts." in name]
    assert len(experts) == 2 * 3
    assert report.shared["model.layers.0.block_sparse_moe.gate.weight"] == "router"


def test_bfloat16_stays(tmp_path: Path) -> None:
    place, out = dense("llama", tmp_path, torch.bfloat16), tmp_path / "packed"
    report = pack(place, out, samples(tmp_path), scope="uniform")
    assert {t.dtype for t in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    original, found = outputs("llama", place), outputs("llama", out, 1)
    error = np.linalg.norm(found - original) / np.linalg.norm(original)
    assert report.profile.levels[0].metrics["relative_error"] == pytest.approx(error, rel=0.02)


def test_the_same_samples_however_they_are_given(tmp_path: Path) -> None:
    """And the same bytes with any number of threads; what is padding does not matter."""
    place = dense("bert", tmp_path)
    pack(place, tmp_path / "one", samples(tmp_path), threads=1)
    pack(place, tmp_path / "two", lines(), threads=2)
    more = tmp_path / "more"
    more.mkdir()
    for part in range(2):
        words = lines()[part * SAMPLES // 2 : (part + 1) * SAMPLES // 2]
        (more / f"{part}.jsonl").write_text("".join(json.dumps({"text": w}) + "\n" for w in words))
    pack(place, tmp_path / "three", more)
    batches = []
    for at in range(0, SAMPLES, 2):
        batch = [word[:LENGTH] for word in lines()[at : at + 2]]
        longest = max(map(len, batch))
        ids = [[LETTERS.index(c) + 2 for c in w] + [0] * (longest - len(w)) for w in batch]
        mask = [[1] * len(w) + [0] * (longest - len(w)) for w in batch]
        batches.append({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)})
    elsa_format.pack(place, tmp_path / "four", sparsities=[75, 50], calibrate=batches)
    found = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in
             ("one", "two", "three", "four")}  # fmt: skip
    assert found["one"] == found["two"] == found["three"] == found["four"]


def test_a_text_is_cut_into_samples(tmp_path: Path) -> None:
    place, text = dense("llama", tmp_path), tmp_path / "text.txt"
    text.write_text(" ".join(lines(400)))
    report = pack(place, tmp_path / "packed", text, samples=32)
    assert report.profile.metrics["relative_error"].samples == 4
    more = tmp_path / "texts"
    more.mkdir()
    for name in ("a.txt", "b.txt"):
        (more / name).write_text(" ".join(lines(20)))
    pack(place, tmp_path / "other", more)


def test_shards_and_pickles(tmp_path: Path) -> None:
    place, given = dense("bert", tmp_path), samples(tmp_path)
    pack(place, tmp_path / "whole", given)
    model = hf.BertForSequenceClassification.from_pretrained(place)
    model.save_pretrained(place, max_shard_size="10KB")
    (place / "model.safetensors").unlink()
    pack(place, tmp_path / "shards", given)
    for file in place.glob("model*"):
        file.unlink()
    torch.save(model.state_dict(), place / "pytorch_model.bin")
    pack(place, tmp_path / "pickle", given)
    levels = []
    for name in ("whole", "shards", "pickle"):
        with elsa_format.open(tmp_path / name) as file:
            levels.append([level.digest for level in file.levels])
    assert levels[0] == levels[1] == levels[2]


def test_arrays_for_what_takes_no_text(tmp_path: Path) -> None:
    torch.manual_seed(0)
    place = tmp_path / "vit"
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    hf.ViTForImageClassification(
        hf.ViTConfig(**config, image_size=8, patch_size=4, intermediate_size=24)
    ).save_pretrained(place)
    pictures = np.random.default_rng(0).standard_normal((24, 3, 8, 8), np.float32)
    np.savez(tmp_path / "samples.npz", pixel_values=pictures)
    np.save(tmp_path / "samples.npy", pictures)
    found = []
    for name in ("samples.npz", "samples.npy"):
        out = tmp_path / name.replace(".", "-")
        elsa_format.pack(place, out, sparsities=[75, 50], calibrate=tmp_path / name)
        found.append((out / "model.safetensors").read_bytes())
    assert found[0] == found[1]
    with pytest.raises(InvalidData, match="takes pixel_values, no text"):
        pack(place, tmp_path / "out", samples(tmp_path))
    np.savez(tmp_path / "samples.npz", images=pictures)
    with pytest.raises(InvalidData, match="'images' is no argument of the model"):
        elsa_format.pack(place, tmp_path / "o", sparsities=50, calibrate=tmp_path / "samples.npz")


# --- Refusals -----------------------------------------------------------------------------------


def refused(place: Path, given: Any, **options: Any) -> str:
    out = place.with_name("refused")
    with pytest.raises(ElsaError) as caught:
        pack(place, out, given, **options)
    assert not out.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_samples_that_are_refused(tmp_path: Path) -> None:
    place = dense("bert", tmp_path)
    file = tmp_path / "s.jsonl"
    file.write_text('{"text": "ab"}\n{"words": "ab"}\n')
    wrong = "found 'words', expected an object with a string 'text'"
    assert refused(place, file) == f"{file}: line 2: {wrong}"
    file.write_text('{"text": "ab"}\nab\n')
    assert refused(place, file) == f"{file}: line 2: is no JSON"
    file.write_text('{"text": "ab"}\n' * 3)
    assert "3 samples in 3 batches: expected at least 4 in 2" in refused(place, file)
    text = tmp_path / "s.txt"
    text.write_text(" \n")
    assert refused(place, text) == f"{text}: holds no text"
    text.write_bytes(b"\xff\xfe")
    assert refused(place, text) == f"{text}: is not UTF-8 text"
    empty = tmp_path / "empty"
    empty.mkdir()
    assert refused(place, empty) == f"{empty}: holds no .txt or .jsonl file"
    assert "expected text (.txt, .jsonl), arrays" in refused(place, place / "config.json")
    assert "no batches" in refused(place, [], length=None)
    batches = [{"input_ids": torch.ones(2, 4, dtype=torch.int64)}] * 4
    assert "needs text" in refused(place, batches)
    archive = tmp_path / "s.npz"
    for ids, problem in (
        (np.full((8, 4), 99), "cannot be called with a batch: IndexError"),
        (np.array([["a"]] * 8), "array 'input_ids' is <U1, expected real numbers"),
    ):
        np.savez(archive, input_ids=ids)
        assert problem in refused(place, archive, length=None)
    archive.write_bytes(archive.read_bytes()[:99])
    assert "is not a numpy archive" in refused(place, archive, length=None)


def test_directories_that_are_refused(tmp_path: Path) -> None:
    given = samples(tmp_path)
    place = dense("bert", tmp_path)
    weights = load_file(place / "model.safetensors")
    config = (place / "config.json").read_text()
    (place / "config.json").write_text(config.replace('"vocab_size": 40', '"vocab_size": 20'))
    save_file(
        {n: t[:20].clone() if "word" in n else t for n, t in weights.items()},
        place / "model.safetensors",
        {"format": "pt"},
    )
    assert "another model's tokenizer" in refused(place, given)
    for file in place.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refused(place, given)
    (place / "config.json").unlink()
    assert "has no config.json" in refused(place, given)

    place = dense("gpt2", tmp_path)
    pack(place, tmp_path / "packed", given)
    assert "already" in refused(tmp_path / "packed", given)
    assert "no layer can be nested" in refused(place, given, exclude="*")
    assert "no tensor matches" in refused(place, given, exclude="head*")
    weights = load_file(place / "model.safetensors")
    weights["transformer.h.0.ln_1.weight"][0] = torch.nan
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    assert "NaN or infinite" in refused(place, given)


@pytest.mark.parametrize("module", ["timm", "torchvision"])
def test_what_timm_lacks_is_named(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cnn"
    place.mkdir()
    save_file({"w": torch.ones(4, 4)}, place / "model.safetensors")
    (place / "config.json").write_text('{"architecture": "resnet18"}')
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "timm.py").write_text("import torchvision")
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    assert f"{module} is not installed; run: pip install {module}" in refused(place, lines())


def test_what_is_not_stored_is_told(tmp_path: Path) -> None:
    place = dense("bert", tmp_path)
    weights = load_file(place / "model.safetensors")
    del weights["classifier.bias"]
    save_file(weights, place / "model.safetensors", {"format": "pt"})
    report = pack(place, tmp_path / "packed", samples(tmp_path))
    assert any("'classifier.bias'" in note for note in report.notes)


def test_options_that_are_refused(tmp_path: Path) -> None:
    place = dense("bert", tmp_path)
    with pytest.raises(InvalidOption, match="levels are not calibrated"):
        elsa_format.pack(place, tmp_path / "out", sparsities=50, length=8)


# --- The command --------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    place, given = dense("llama", tmp_path), samples(tmp_path)
    words = ["pack", place, "--sparsities", "75,50", "--calibrate", given, "--length", "8"]
    command = [Path(sys.executable).with_name("elsa"), *words, "-o", tmp_path / "out", "--json"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with elsa_format.open(tmp_path / "out") as file:
        metrics = [level.metrics for level in file.levels]
    assert [level["metrics"] for level in found["levels"]] == metrics
    (place / "tokenizer.json").write_text("{}")
    done = subprocess.run([*command, "--force"], env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 1, done.stderr
