"""Levels of PyTorch modules by calibration: what is read back is what was measured."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from elsa_converters.torch import InvalidData, calibrate, load_level
from internals import HELD, spread
from torch import Tensor, nn

import elsa_format
from elsa_format import ElsaError, InvalidOption, NoSuchTensor

LEVELS = [75, 50]


def batches_of(*shape: int, count: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Correlated inputs, as real ones are."""
    random = torch.Generator().manual_seed(1)
    mix = torch.randn(shape[-1], shape[-1], generator=random) / shape[-1] ** 0.5
    return [(torch.randn(shape, generator=random) @ mix).to(dtype) for _ in range(count)]


class Residual(nn.Module):
    """Writes to its inputs, and to what its blocks gave."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True))
        self.last = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        y = self.first(x)
        y += x
        return self.last(y)


class Twice(nn.Module):
    """Calls one layer twice, another under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(8, 8), nn.Linear(8, 5)
        self.again = self.up

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.again(torch.relu(self.up(x)))))


class Tied(nn.Module):
    """A head whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(32, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)))


class Experts(nn.Module):
    """Every sample goes to one of some experts; the last one gets none."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(8, 8), nn.Linear(8, 4)
        self.router.bias.data[3] = -100
        self.merged = nn.Parameter(torch.randn(4, 8, 8)) if merged else None
        if not merged:
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        chosen = self.router(x).argmax(-1)
        y = torch.zeros_like(x)
        for expert in range(4):
            (at,) = torch.where(chosen == expert)
            if not len(at):
                continue
            if self.merged is None:
                y[at] = self.experts[expert](x[at])
            else:
                y[at] = nn.functional.linear(x[at], self.merged[expert])
        return self.last(y)


def convolutions(kind: int) -> nn.Module:
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[kind - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[kind - 1]
    pool = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[kind - 1]
    model = nn.Sequential(
        conv(4, 8, 3, stride=2, padding=1, bias=False),
        norm(8),
        nn.ReLU(inplace=True),
        conv(8, 8, 3, padding="same", dilation=2, groups=2),
        norm(8),
        nn.ReLU(),
        conv(8, 8, 3, padding=1, groups=8),
        conv(8, 12, 1),
        pool(1),
        nn.Flatten(),
        nn.Linear(12, 5),
    )
    random = torch.Generator().manual_seed(2)
    for module in model:
        if isinstance(module, norm):
            for tensor in (module.running_var, module.weight.data):
                tensor += torch.rand(tensor.shape, generator=random)
            module.running_mean += torch.randn(8, generator=random)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 6)
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
    "mlp": (mlp, batches_of(16, 16)),
    "conv1d": (lambda: convolutions(1), batches_of(4, 4, 12)),
    "conv2d": (lambda: convolutions(2), batches_of(4, 4, 9, 8)),
    "conv3d": (lambda: convolutions(3), batches_of(2, 4, 5, 6, 7)),
    "residual": (Residual, batches_of(16, 12)),
    "twice": (Twice, batches_of(16, 8)),
    "tied": (Tied, [torch.arange(32).roll(n).reshape(4, 8) for n in range(8)]),
    "experts": (lambda: Experts(merged=False), batches_of(24, 8)),
    "merged": (lambda: Experts(merged=True), batches_of(24, 8)),
    "bfloat16": (lambda: mlp().bfloat16(), batches_of(16, 16, dtype=torch.bfloat16)),
}


def make(name: str) -> tuple[nn.Module, list[Any]]:
    torch.manual_seed(0)
    model, batches = NETWORKS[name]
    return model(), [batch.clone() for batch in batches]


def run(model: nn.Module, batches: list[Any]) -> np.ndarray:
    """The outputs for the samples that calibration holds back."""
    held = spread(range(len(batches)), HELD)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        found = [model.eval()(batches[at].clone()) for at in held]
    torch.set_num_threads(threads)
    return torch.cat([one.reshape(-1, one.shape[-1]).float() for one in found]).numpy()


def bits(model: nn.Module) -> dict[str, bytes]:
    state = model.state_dict()
    return {name: bytes(tensor.reshape(-1).view(torch.uint8)) for name, tensor in state.items()}


@pytest.mark.parametrize("name", NETWORKS)
def test_levels_give_the_outputs_that_were_measured(name: str, tmp_path: Path) -> None:
    model, batches = make(name)
    before, original = bits(model), run(copy.deepcopy(model), batches)
    flags = [module.training for module in model.modules()]
    given, random = [batch.clone() for batch in batches], torch.get_rng_state()
    out = tmp_path / "net.safetensors"
    report = calibrate(model, batches, out, sparsities=LEVELS, classes="logits")
    assert bits(model) == before
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, batches, given))

    profile = report.profile
    told = [*(level.metrics for level in profile.levels), profile.dense_metrics]
    for level, metrics in zip((1, 2, "dense"), told, strict=True):
        other = make(name)[0]
        load_level(other, out, level)
        outputs = run(other, batches)
        error = np.linalg.norm(outputs - original) / np.linalg.norm(original)
        assert metrics["relative_error"] == pytest.approx(error, rel=1e-6, abs=1e-7)
        assert metrics["agreement"] == np.mean(outputs.argmax(-1) == original.argmax(-1))
    errors = [metrics["relative_error"] for metrics in told]
    assert errors[0] > errors[1] > errors[2]
    elsa_format.verify(out)


def test_which_tensors_vary(tmp_path: Path) -> None:
    """Where a bias has batch norm behind it, its mean and weight; small weights of depthwise."""
    model, batches = make("conv2d")
    report = calibrate(model, batches, tmp_path / "net.safetensors", sparsities=LEVELS)
    assert report.nested == ("0.weight", "3.weight", "7.weight", "10.weight")
    norms = {f"{at}.{name}" for at in (1, 4) for name in ("running_mean", "weight")}
    depthwise, biases = {"6.weight", "6.bias"}, {"7.bias", "10.bias"}
    assert set(report.profile.per_level) == norms | depthwise | biases


def test_what_several_use_is_left(tmp_path: Path) -> None:
    model, batches = make("tied")
    report = calibrate(model, batches, tmp_path / "net.safetensors", sparsities=LEVELS)
    assert report.nested == ("layer.weight",)
    assert report.shared["embed.weight"] == "is used in other ways, too"


@pytest.mark.parametrize("name", ["experts", "merged"])
def test_experts_that_no_sample_has_reached(name: str, tmp_path: Path) -> None:
    model, batches = make(name)
    report = calibrate(model, batches, tmp_path / "net.safetensors", sparsities=LEVELS)
    expert = "merged[3]" if name == "merged" else "experts.3.weight"
    (note,) = [note for note in report.notes if "saw few inputs" in note]
    assert f"'{expert}' 0" in note
    assert ("merged" if name == "merged" else expert) in report.nested
    with elsa_format.open(tmp_path / "net.safetensors") as file:
        expert = file.tensor("merged", 1)[3] if name == "merged" else file.tensor(expert, 1)
    own = model.merged[3] if name == "merged" else model.experts[3].weight
    kept = expert != 0
    assert kept.any()
    assert not kept.all()
    assert np.abs(expert - own.detach().numpy())[kept].max() < 0.2


def test_the_same_bits_with_any_threads_and_memory(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    for name in ("conv2d", "merged"):
        found = []
        for options in ({"threads": 1}, {"threads": 3}, {"max_memory": 1}):
            model, batches = make(name)
            out = tmp_path / f"{name}-{len(found)}.safetensors"
            calibrate(model, batches, out, sparsities=LEVELS, classes="logits", **options)
            found.append(out.read_bytes())
        assert found[0] == found[1] == found[2]
    assert torch.get_num_threads() == threads


def test_batches_of_several_arguments(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.one(x) + self.other(y), self.other(y)

    model, x, y = Two(), batches_of(8, 8), batches_of(8, 4)
    found = []
    pairs = list(zip(x, y, strict=True))
    for batches in (pairs, [{"y": b, "x": a} for a, b in pairs]):
        out = tmp_path / f"{len(found)}.safetensors"
        report = calibrate(model, batches, out, sparsities=LEVELS)
        assert report.nested == ("one.weight", "other.weight")
        found.append(out.read_bytes())
    assert found[0] == found[1]


def test_padding_does_not_count(tmp_path: Path) -> None:
    model, batches = make("mlp")
    found = []
    for garbage in (0.0, 100.0):
        padded = [torch.cat([batch, torch.full((3, 16), garbage)]) for batch in batches]
        out = tmp_path / f"{garbage}.safetensors"
        calibrate(
            model, padded, out, sparsities=LEVELS, padding=lambda batch: np.arange(19)[:, None] > 15
        )
        found.append(out.read_bytes())
    assert found[0] == found[1]


def test_options(tmp_path: Path) -> None:
    model, batches = make("mlp")
    out = tmp_path / "net.safetensors"
    report = calibrate(
        model, batches, out, sparsities=["1:4", "2:4"], exclude="4.*", names=["small", "large"]
    )
    assert report.nested == ("0.weight", "2.weight")
    assert report.shared["4.weight"] == "excluded"
    assert [level.name for level in report.profile.levels] == ["small", "large"]
    with elsa_format.open(out) as file:
        groups = file.tensor("0.weight", "small").reshape(-1, 4)
    assert ((groups != 0).sum(-1) == 1).all()
    report = calibrate(model, batches, out, sparsities=50, samples=70, force=True)
    assert report.profile.metrics["relative_error"].samples == 6
    calibrate(model, batches, out, sparsities=50, keep_dense="exact", force=True)
    with elsa_format.open(out) as file:
        assert np.allclose(file.tensor("0.weight"), model[0].weight.detach(), rtol=1e-6)


class Failing(nn.Module):
    """Cannot go on after some calls."""

    def __init__(self, calls: int, error: type[BaseException]) -> None:
        super().__init__()
        self.layer, self.left, self.error = nn.Linear(8, 8), [calls], error

    def forward(self, x: Tensor) -> Tensor:
        self.left[0] -= 1
        if self.left[0] < 0:
            raise self.error("no more")
        return self.layer(x)

    def __deepcopy__(self, memo: Any) -> "Failing":
        other = Failing(0, self.error)
        other.left, other.layer = self.left, copy.deepcopy(self.layer, memo)
        return other


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("calls", [0, 5, 20, 40])
def test_nothing_is_left_when_it_fails(
    error: type[BaseException], calls: int, tmp_path: Path
) -> None:
    raised = InvalidData if error is RuntimeError else error
    with pytest.raises(raised, match="no more"):
        calibrate(
            Failing(calls, error), batches_of(4, 8), tmp_path / "net.safetensors", sparsities=50
        )
    assert list(tmp_path.iterdir()) == []


def refused(model: nn.Module, batches: list[Any], **fields: Any) -> str:
    with pytest.raises(ElsaError) as caught:
        calibrate(model, batches, "no.safetensors", sparsities=LEVELS, **fields)
    assert not Path("no.safetensors").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, batches = make("mlp")
    assert "no batches" in refused(model, [])
    assert "expected at least 4 in 2" in refused(model, batches[:1])
    assert "expected at least 4 in 2" in refused(model, [batch[:1] for batch in batches[:3]])
    assert "batch 2 holds no tensor" in refused(model, [batches[0], "text"])
    nan = [*batches[:7], batches[7] * torch.nan]
    assert "NaN or infinite" in refused(model, nan)
    assert "no layer can be nested" in refused(nn.LayerNorm(16), batches)
    assert "no layer can be nested" in refused(model, batches, exclude="*")
    assert "no tensor matches" in refused(model, batches, exclude="head*")
    with torch.device("meta"):
        assert "meta device" in refused(mlp(), batches)
    assert "lazy" in refused(nn.LazyLinear(3), batches)
    assert "no floating tensor" in refused(nn.Sequential(model, Most()), batches)
    assert "RuntimeError: mat1 and mat2" in refused(model, [batch[:, :9] for batch in batches])
    assert "holds its arguments, and no labels" in refused(model, [(b, b) for b in batches])
    assert "samples are empty" in refused(model, [batch[:, None, :][:, :0] for batch in batches])
    assert "TorchScript" in refused(torch.jit.trace(model, batches[0]), batches)


def test_a_parametrized_layer_is_not_looked_at(tmp_path: Path) -> None:
    """Spectral norm changes its state whenever its weight is asked for in training."""
    norm = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    model, batches = nn.Sequential(norm, nn.Linear(16, 4)).train(), batches_of(16, 16)
    before = bits(model)
    report = calibrate(model, batches, tmp_path / "net.safetensors", sparsities=LEVELS)
    assert report.nested == ("1.weight",)
    assert bits(model) == before


def test_a_batch_may_be_empty(tmp_path: Path) -> None:
    model, batches = make("mlp")
    report = calibrate(
        model, [batches[0][:0], *batches], tmp_path / "net.safetensors", sparsities=LEVELS
    )
    assert report.profile.dense_metrics["relative_error"] < 0.2


class Most(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.argmax(-1)


def test_errors_are_of_known_kinds(tmp_path: Path) -> None:
    model, batches = make("mlp")
    out = tmp_path / "net.safetensors"
    with pytest.raises(InvalidData):
        calibrate(model, batches[:1], out, sparsities=LEVELS)
    with pytest.raises(NoSuchTensor):
        calibrate(model, batches, out, sparsities=LEVELS, include="head*")
    with pytest.raises(InvalidOption):
        calibrate(nn.LazyLinear(3), batches, out, sparsities=LEVELS)


def test_the_head_weighs_classes_that_are_seen(tmp_path: Path) -> None:
    model, batches = make("mlp")
    model[4].bias.data[5] = -100
    out = tmp_path / "net.safetensors"
    report = calibrate(model, batches, out, sparsities=LEVELS, classes="logits")
    assert any("never one of" in note and "5" in note for note in report.notes)
    report = calibrate(model, batches, out, sparsities=LEVELS, force=True)
    assert not any("never one of" in note for note in report.notes)
