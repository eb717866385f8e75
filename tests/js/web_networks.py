"""Small networks as a web server has them, and what Python makes of each of their levels."""

import functools
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from elsa_converters.onnx import export_web, session

import elsa_format
from benchmarks import _graphs as graphs

LEVELS: tuple[Any, ...] = (1, 2, "dense")
WORDS = ["the", "a", "cat", "dog", "sat", "on", "mat", "ran", "in", "park", "red", "blue", "."]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LABELS = {"id2label": {"0": "x", "1": "y", "2": "z", "3": "v", "4": "w"}}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {"model_type": "bert"},
    "cls": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **LABELS},
    "cnn": {"model_type": "mobilenet_v2", **LABELS},
    "dec": {"model_type": "gpt2", "n_head": 4, "n_layer": 2, "n_embd": 64, "eos_token_id": 199},
}


def models() -> dict[str, onnx.ModelProto]:
    """An encoder, a classifier, an image model and a decoder with a cache."""
    return {
        "bert": graphs.bert(graphs.random_bert(words=2100), 4),
        "cls": graphs.bert(graphs.random_bert(1, labels=3), 4, labels=True),
        "cnn": graphs.mobile(),
        "dec": graphs.decoder(graphs.random_decoder(), 4),
    }


def tokenizer() -> dict[str, dict[str, Any]]:
    """tokenizer.json and its settings, of a few words."""
    ids = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    added = [
        {"id": i, "content": w, "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
        for i, w in enumerate(SPECIAL)
    ]
    ends = {w: {"id": w, "ids": [ids[w]], "tokens": [w]} for w in ("[CLS]", "[SEP]")}
    first, last = ({"SpecialToken": {"id": w, "type_id": 0}} for w in ends)
    single = [first, {"Sequence": {"id": "A", "type_id": 0}}, last]
    processor = {"type": "TemplateProcessing", "single": single, "pair": []}
    cleaned = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    model = {"type": "WordPiece", "unk_token": "[UNK]", "vocab": ids}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "BertNormalizer", "lowercase": True, **cleaned},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": processor | {"special_tokens": ends},
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": model | {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100},
        },
        "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "model_max_length": 64}
        | dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=False)),
    }


def build(folder: Path) -> Path:
    """Each network packed, and its directory for the web in `www`."""
    for name, model in models().items():
        source = folder / name
        source.mkdir()
        onnx.save(model, source / "net.onnx")
        weights, template = source / "model.safetensors", source / "template.onnx"
        elsa_format.pack(source / "net.onnx", weights, sparsities=[90, 70], template=template)
        files = {"config.json": CONFIGS[name]} | (tokenizer() if name != "cnn" else {})
        for file, content in files.items():
            (source / file).write_text(json.dumps(content))
        export_web(source, template, folder / "www" / name)
    return folder / "www"


def feeds(name: str) -> dict[str, Any]:
    """The inputs of transformers_tasks.js."""
    if name == "cnn":
        pixels = np.sin(np.arange(3 * 32 * 32)).astype(np.float32)
        return {"pixel_values": pixels.reshape(1, 3, 32, 32)}
    ids = np.array([[2, 5, 6, 7, 3], [2, 8, 9, 3, 0]])
    return {"input_ids": ids, "attention_mask": np.minimum(ids, 1), "token_type_ids": 0 * ids}


def reference(folder: Path) -> dict[str, list[float]]:
    """What ONNX Runtime makes of these in Python, at each level."""
    found = {}
    for name in CONFIGS:
        source = folder / name
        for level in LEVELS:
            opened = session(source / "model.safetensors", source / "template.onnx", level=level)
            made = greedy(opened) if name == "dec" else opened.run(None, feeds(name))[0]
            found[f"{name} {level}"] = made.ravel().tolist()
    return found


def greedy(opened: Any, steps: int = 6) -> Any:
    """The tokens that are most likely, one after the other, without the cache."""
    ids = np.array([[5, 6, 7]])
    none = np.zeros((1, 4, 0, 16), np.float32)
    past = {f"past_key_values.{i}.{kind}": none for i in (0, 1) for kind in ("key", "value")}
    for _ in range(steps):
        given = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        logits = opened.run(None, given | {"position_ids": np.arange(ids.size)[None]} | past)[0]
        ids = np.append(ids, logits[:, -1:].argmax(-1), 1)
    return ids


def assert_same(found: dict[str, Any], expected: dict[str, list[float]], tolerance: float) -> None:
    """Every level of every network, as Python has it."""
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, atol=tolerance, rtol=0, err_msg=name)


def served(folder: Path, handler: Any) -> Iterator[str]:
    """A server of a folder, until it is no longer needed."""
    made = functools.partial(handler, directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), made)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
    thread.join()
