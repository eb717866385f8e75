"""Metrics of every level in a module: those of ONNX Runtime; and the module is as before."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_models as m
import pytest
import torch
from elsa_converters import onnx
from elsa_converters.torch import InvalidData, evaluate, load_level
from torch import nn

import elsa_format
from elsa_format import Incomplete, InvalidOption, Metric, TensorMismatch

LEVELS = [1, 2, 3, "dense"]
COUNT = 200


class Mlp(nn.Module):
    """What tests/onnx/onnx_models.py calls mlp."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(16, 40))
        self.b1 = nn.Parameter(torch.zeros(40))
        self.w2 = nn.Parameter(torch.zeros(40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.w1 + self.b1).relu() @ self.w2


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("net")
    return m.packed(m.save(m.mlp(), folder / "m.onnx"), folder)


@pytest.fixture
def data() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "x": rng.standard_normal((COUNT, 16)).astype(np.float32),
        "labels": rng.integers(0, 8, COUNT),
    }


def batches_of(data: dict[str, Any], size: int = 64) -> list[tuple[torch.Tensor, ...]]:
    tensors = [torch.from_numpy(array) for array in data.values()]
    return list(zip(*(tensor.split(size) for tensor in tensors), strict=True))


def test_accuracy_is_that_of_onnx_runtime(net: Any, data: Any) -> None:
    found = evaluate(Mlp(), net[0], batches_of(data))
    assert found == onnx.evaluate(*net, data)
    assert list(found) == LEVELS
    assert len({metrics["accuracy"].value for metrics in found.values()}) > 2


def test_errors_are_those_of_onnx_runtime(net: Any, data: Any) -> None:
    data = {"x": data["x"], "targets": m.weights(COUNT, 8, seed=4)}
    found = evaluate(Mlp(), net[0], batches_of(data), "mse")
    for level, metrics in onnx.evaluate(*net, data).items():
        for name, metric in metrics.items():
            assert found[level][name].value == pytest.approx(metric.value, rel=1e-5)
            assert found[level][name].error == pytest.approx(metric.error, rel=1e-4)
            assert found[level][name].better == metric.better


class Busy(nn.Module):
    """A layer that every level shares, batch norm, dropout, and a buffer that a run changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout()
        self.last = nn.Linear(32, 8)
        self.register_buffer("runs", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.last(self.drop(self.norm(self.first(x))))


def test_the_module_is_as_it_was(tmp_path: Path, data: Any) -> None:
    packed = Busy()
    elsa_format.pack(packed.state_dict(), tmp_path / "net.safetensors", sparsities=[90, 50])
    content = (tmp_path / "net.safetensors").read_bytes()
    model = Busy()  # other weights than those of the file
    with torch.no_grad():
        model.first.weight[0] = torch.tensor([-0.0, torch.nan] * 8)  # which are equal to others
    model.drop.eval()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    modes = [module.training for module in model.modules()]

    def unfit(model: Any, batch: Any) -> Any:
        raise RuntimeError("in the middle")

    found = evaluate(model, tmp_path / "net.safetensors", batches_of(data))
    with pytest.raises(RuntimeError, match="in the middle"):
        evaluate(model, tmp_path / "net.safetensors", batches_of(data), unfit)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        assert tensor is tensors[name]
        assert tensor.numpy(force=True).tobytes() == before[name].numpy().tobytes()
    assert [module.training for module in model.modules()] == modes
    assert (tmp_path / "net.safetensors").read_bytes() == content
    for level, metrics in found.items():
        plain = Busy().eval()
        load_level(plain, tmp_path / "net.safetensors", level)
        with torch.no_grad():
            outputs = plain(torch.from_numpy(data["x"])).numpy()
        right = (outputs.argmax(1) == data["labels"]).mean()
        assert metrics["accuracy"].value == pytest.approx(right)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_a_function_of_ones_own(net: Any, data: Any) -> None:
    def score(model: nn.Module, batch: Any) -> Any:
        x, labels = batch
        assert not torch.is_grad_enabled()
        losses = nn.functional.cross_entropy(model(x), labels, reduction="none")
        return {"loss": losses, "first": (model(x)[:, 0].bfloat16(), "higher")}

    found = evaluate(Mlp(), net[0], batches_of(data), score)
    model = Mlp()
    for level, metrics in found.items():
        load_level(model, net[0], level)
        with torch.no_grad():
            x, labels = (torch.from_numpy(array) for array in data.values())
            losses = nn.functional.cross_entropy(model(x), labels, reduction="none").numpy()
        assert metrics["loss"].value == pytest.approx(losses.mean(), rel=1e-5)
        assert metrics["loss"].error == pytest.approx(losses.std(ddof=1) / COUNT**0.5, rel=1e-4)
        assert (metrics["first"].better, metrics["first"].samples) == ("higher", COUNT)


def test_batches_of_mappings_and_the_levels_that_are_downloaded(
    net: Any, data: Any, tmp_path: Path
) -> None:
    ship, begun = tmp_path / "ship.safetensors", tmp_path / "begun.safetensors"
    elsa_format.ship(net[0], ship)
    with elsa_format.open(ship) as file:
        begun.write_bytes(ship.read_bytes()[: file.downloads[1]])
        none = ship.read_bytes()[: file.downloads[1] - 1]
    batches = [{"x": x, "labels": labels} for x, labels in batches_of(data)]
    every = evaluate(Mlp(), net[0], batches)
    assert evaluate(Mlp(), begun, batches) == {1: every[1]}
    begun.write_bytes(none)
    with pytest.raises(Incomplete, match="no level is downloaded"):
        evaluate(Mlp(), begun, batches)


class Words(nn.Module):
    """A language model with one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def test_perplexity_counts_every_token_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Words(), tmp_path / "net.safetensors"
    elsa_format.pack(model.state_dict(), path, sparsities=[90, 50], exclude=[])
    batches = [torch.randint(0, 20, size) for size in ((2, 9), (1, 4))]
    found = evaluate(model, path, batches, "perplexity")
    for level, metrics in found.items():
        load_level(model, path, level)
        with torch.no_grad():
            losses = torch.cat(
                [
                    nn.functional.cross_entropy(
                        model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
                    )
                    for ids in batches
                ]
            )
        assert losses.numel() == 19
        loss, perplexity = metrics["loss"], metrics["perplexity"]
        assert loss.value == pytest.approx(float(losses.mean()), rel=1e-5)
        assert perplexity.value == pytest.approx(float(losses.mean().exp()), rel=1e-5)
        assert (loss.better, perplexity.better, loss.samples) == ("lower", "lower", 3)
        assert perplexity.error == pytest.approx(perplexity.value * loss.error)
    with pytest.raises(InvalidData, match="no token to predict"):
        evaluate(model, path, [torch.ones((1, 1), dtype=torch.int64)], "perplexity")


def one_by_one(data: Any) -> Iterator[Any]:
    yield from batches_of(data)


@pytest.mark.parametrize(
    ("batches", "options", "error", "words"),
    [
        ([], {}, InvalidData, "batches: holds no samples"),
        (one_by_one, {}, InvalidOption, "expected a list or a DataLoader"),
        (3, {}, InvalidOption, "expected a list or a DataLoader"),
        ([torch.ones(4, 16)], {}, InvalidData, "expected pairs of inputs and labels"),
        ([(torch.ones(4, 16), torch.full((4,), 8))], {}, InvalidData, r"label 8 .* 0\.\.7"),
        ([(torch.ones(4, 16), torch.ones(4))], {}, InvalidData, "labels are float32"),
        (
            [(torch.ones(4, 16), torch.ones(3).long())],
            {},
            InvalidData,
            r"\[4, 8\], .* \[3, cl",
        ),
        ([(torch.full((4, 16), torch.nan), torch.ones(4).long())], {}, InvalidData, "holds NaN"),
        ([(torch.ones(4, 16), torch.ones(4, 9))], {"metric": "mse"}, InvalidData, r"\[4, 9\]"),
        ([torch.ones(4, 16)], {"metric": "perplexity"}, InvalidData, "expected tensors of token"),
        ([1], {"metric": "f1"}, InvalidOption, "expected one of 'accuracy', 'mse', 'perplexity'"),
        ([1], {"metric": lambda *_: None}, InvalidData, "returned no values"),
        ([1], {"metric": lambda *_: {"loss": 0.5}}, InvalidData, "a number for each"),
        ([1], {"metric": lambda *_: {"mine": [0.5]}}, InvalidOption, "needs a direction"),
    ],
)
def test_what_cannot_be_measured(
    net: Any, data: Any, batches: Any, options: Any, error: Any, words: str
) -> None:
    batches = batches(data) if callable(batches) else batches
    with pytest.raises(error, match=words):
        evaluate(Mlp(), net[0], batches, **options)


def test_a_model_that_does_not_fit_is_refused(net: Any, data: Any) -> None:
    with pytest.raises(TensorMismatch):
        evaluate(Busy(), net[0], batches_of(data))
    model = Mlp()
    model.b1.data = torch.zeros(1).expand(40)
    with pytest.raises(InvalidOption, match="expanded from less memory"):
        evaluate(model, net[0], batches_of(data))
    with pytest.raises(InvalidOption, match="lazy parameters; run it once first"):
        evaluate(nn.LazyLinear(3), net[0], batches_of(data))
    with torch.device("meta"):
        model = Mlp()
    with pytest.raises(InvalidOption, match="on the meta device; load a level into it first"):
        evaluate(model, net[0], batches_of(data))


def test_metrics_of_weights_are_those_of_the_module(net: Any, data: Any) -> None:
    """`elsa_format.evaluate` with a function that runs the network by itself."""

    def accuracy(weights: dict[str, Any]) -> dict[str, float]:
        hidden = np.maximum(data["x"] @ weights["w1"] + weights["b1"], 0)
        return {"accuracy": float(((hidden @ weights["w2"]).argmax(1) == data["labels"]).mean())}

    found = elsa_format.evaluate(net[0], accuracy)
    for level, metrics in evaluate(Mlp(), net[0], batches_of(data)).items():
        assert found[level]["accuracy"].value == pytest.approx(metrics["accuracy"].value)
        assert isinstance(found[level]["accuracy"], Metric)
