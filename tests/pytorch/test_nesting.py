"""Levels that are trained: what froze is what the file gives back, whatever the loop does."""

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import elsa_converters.torch as elsa_torch
import numpy as np
import pytest
import torch
from decoder import content, decode
from internals import (
    FROZEN,
    FrozenWeightChanged,
    InfeasibleTraining,
    MissedBudget,
    NonFiniteLoss,
    NotReproduced,
    TrainError,
    embed,
    flush,
    keys,
    select,
    select_blocks,
    words_of,
)
from torch import Tensor, nn

import elsa_format
from elsa_format.levels import Pattern
from elsa_train.torch import Nesting, Schedule

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GRADUAL = Schedule(start=0, end=6, every=2)


class Net(nn.Module):
    """A convolution with statistics, an embedding tied to a head, a bias that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 16)
        self.embed = nn.Embedding(5, 16)
        self.head = nn.Linear(16, 5, bias=False)
        self.head.weight = self.embed.weight
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).amax((2, 3))
        logits: Tensor = self.head(torch.relu(self.fc(hidden)))
        return logits


class Run:
    """A model, its optimizer, and batches that depend on the step alone."""

    def __init__(self, make: Callable[..., Any] = torch.optim.AdamW, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.at, self.amp = Net(), 0, False
        options = {"lr": 0.01} | options
        self.optimizer = make(self.model.parameters(), **options)

    def train(self, steps: int) -> None:
        self.model.train()
        scaler = torch.amp.GradScaler("cpu", enabled=self.amp)
        for _ in range(steps):
            rng = torch.Generator().manual_seed(self.at)
            x, y = torch.randn(16, 1, 8, 8, generator=rng), torch.arange(16) % 5
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.amp):
                loss = nn.functional.cross_entropy(self.model(x), y)
            scaler.scale(loss).backward()
            scaler.step(self.optimizer)
            scaler.update()
            self.at += 1


def snapshot(model: nn.Module) -> dict[str, bytes]:
    return {n: content(t) for n, t in model.state_dict().items() if n != "head.weight"}


def train_all(run: Run, nesting: Nesting, schedule: Schedule = GRADUAL) -> list[dict[str, bytes]]:
    """All levels, and what the model was at each freeze."""
    frozen = []
    for _ in nesting.levels:
        nesting.sparsify(schedule)
        run.train(8)
        nesting.freeze()
        frozen.append(snapshot(run.model))
        nesting.densify()
        run.train(4)
    return frozen


OPTIMIZERS: dict[str, Callable[..., Run]] = {
    "sgd": lambda: Run(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=5e-4, lr=0.05),
    "adamw": lambda: Run(torch.optim.AdamW, weight_decay=0.1),
    "fused": lambda: Run(torch.optim.AdamW, weight_decay=0.1, fused=True),
    "foreach": lambda: Run(torch.optim.AdamW, weight_decay=0.1, foreach=True),
    "amsgrad": lambda: Run(torch.optim.Adam, amsgrad=True, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "amp"])
def test_the_file_gives_back_what_was_frozen(name: str, amp: bool, tmp_path: Path) -> None:
    run = OPTIMIZERS[name]()
    run.amp = amp
    nesting = Nesting(run.model, run.optimizer, "90,70,40")
    frozen = train_all(run, nesting)
    path = tmp_path / "net.safetensors"
    nesting.write(path, evaluate=lambda: {"accuracy": 0.5})
    for t, expected in enumerate(frozen, 1):
        assert decode(path, t) == expected
    assert decode(path, None) == snapshot(run.model)
    with elsa_format.open(path) as file:
        prunable = run.model.conv.weight.numel() + run.model.fc.weight.numel()
        kept = [sum(file.nested[n][t] for n in nesting.prunable) for t in range(3)]
        assert kept == [round(prunable * share) for share in (0.1, 0.3, 0.6)]
        assert nesting.prunable == ("conv.weight", "fc.weight")
        assert set(file.per_level) == {
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        }
        assert file.profile.dense_metrics == {"accuracy": 0.5}


def test_the_file_loads_into_the_model(tmp_path: Path) -> None:
    run = Run()
    nesting = Nesting(run.model, run.optimizer, "90,50", scope="uniform")
    frozen = train_all(run, nesting)
    nesting.write(tmp_path / "net.safetensors")
    other = Net()
    elsa_torch.load_level(other, tmp_path / "net.safetensors", 1)
    assert snapshot(other) == frozen[0]
    assert other.head.weight is other.embed.weight


def test_measures_are_those_of_the_level(tmp_path: Path) -> None:
    run = Run()
    nesting = Nesting(run.model, run.optimizer, "90,50", fresh=Net)
    seen = []

    def evaluate() -> dict[str, float]:
        seen.append(snapshot(run.model))
        return {"loss": torch.tensor(0.25)}  # type: ignore[dict-item]

    nesting.sparsify()
    frozen = nesting.freeze(evaluate)
    nesting.sparsify()
    nesting.freeze()
    nesting.write(tmp_path / "net.safetensors")
    assert frozen.metrics == {"loss": 0.25}
    assert decode(tmp_path / "net.safetensors", 1) == seen[0]
    assert elsa_format.open(tmp_path / "net.safetensors").levels[0].metrics == {"loss": 0.25}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_stored_narrower_than_trained(dtype: torch.dtype, tmp_path: Path) -> None:
    run = Run()
    nesting = Nesting(run.model, run.optimizer, "90,50", dtype=dtype)
    frozen = train_all(run, nesting)
    path = tmp_path / "net.safetensors"
    nesting.write(path)
    level = elsa_torch.state_dict(path, 1)
    assert level["conv.weight"].dtype == dtype
    assert content(level["conv.weight"].float()) == frozen[0]["conv.weight"]
    assert level["norm.running_mean"].dtype == torch.float32


def test_one_shot_levels_are_those_of_pack(tmp_path: Path) -> None:
    """The same definition of what "keep 10 %" means."""
    run = Run()
    dense = {"conv.weight": run.model.conv.weight, "fc.weight": run.model.fc.weight}
    expected = {name: p.detach().clone() for name, p in dense.items()}
    for scope in ("global", "uniform"):
        packed = tmp_path / f"{scope}.safetensors"
        elsa_format.pack(expected, packed, sparsities=["93", "71.5"], scope=scope)
        torch.manual_seed(0)
        model = Net()
        nesting = Nesting(model, None, ["93", "71.5"], scope=scope)
        for _ in nesting.levels:
            nesting.sparsify()
            nesting.freeze()
            with torch.no_grad():  # as if densify had found the old weights again
                for name, p in nesting.params.items():
                    free = nesting.counters[name] == 0
                    p.copy_(torch.where(free, expected.get(name, p), p))
        with elsa_format.open(packed) as file:
            for name in dense:
                wanted = elsa_format.read_counters(file.tensor(name), file.bits)
                assert np.array_equal(nesting.counters[name].numpy(), wanted)


def test_patterns_are_along_the_inputs(tmp_path: Path) -> None:
    class Conv1D(nn.Module):  # as in GPT-2: inputs first
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 7))

    model = nn.Sequential(nn.Linear(16, 5), Conv1D(), nn.Conv2d(8, 3, 3))
    nesting = Nesting(model, None, "1:8,1:4,2:4")
    for _ in nesting.levels:
        nesting.sparsify()
        nesting.freeze()
        with torch.no_grad():
            for name, p in nesting.params.items():
                p.copy_(torch.where(nesting.counters[name] == 0, torch.randn_like(p), p))
    nesting.write(tmp_path / "net.safetensors")
    level = elsa_torch.state_dict(tmp_path / "net.safetensors", "2:4")
    for name, axis in (("0.weight", 1), ("1.weight", 0), ("2.weight", 1)):
        kept = (level[name].movedim(axis, -1) != 0).unflatten(-1, (-1, 4)).sum(-1)
        assert (kept == 2).all()
    with pytest.raises(InfeasibleTraining, match=r"2\.weight.*not divisible by 16"):
        Nesting(model, None, "1:16")


def test_resuming_gives_the_same_bytes(tmp_path: Path) -> None:
    def save(run: Run, nesting: Nesting) -> None:
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        torch.save({**state, "nesting": nesting.state_dict(), "at": run.at}, tmp_path / "run.pt")

    def resume() -> tuple[Run, Nesting]:
        run = Run()
        nesting = Nesting(run.model, run.optimizer, "90,50")
        state = torch.load(tmp_path / "run.pt", weights_only=True)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.at = state["at"]
        nesting.load_state_dict(state["nesting"])
        return run, nesting

    def whole(interrupt: bool, path: Path) -> bytes:
        run = Run()
        nesting = Nesting(run.model, run.optimizer, "90,50")
        for _ in range(2):
            nesting.sparsify(GRADUAL)
            for steps in (3, 5):
                run.train(steps)
                if interrupt:
                    save(run, nesting)
                    run, nesting = resume()
            nesting.freeze()
            run.train(2)
            if interrupt:
                save(run, nesting)
                run, nesting = resume()
            run.train(2)
        nesting.write(path)
        return path.read_bytes()

    assert whole(True, tmp_path / "a.safetensors") == whole(False, tmp_path / "b.safetensors")


def test_gradients_that_are_not_finite_do_not_move_frozen_weights() -> None:
    run = Run(torch.optim.SGD)
    nesting = Nesting(run.model, run.optimizer, "50")
    nesting.sparsify()
    nesting.freeze()
    frozen = {n: words_of(p.detach()).clone() for n, p in nesting.params.items()}
    for p in run.model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    run.optimizer.step()
    for name, p in nesting.params.items():
        held = nesting.counters[name] > 0
        assert torch.equal(words_of(p.detach())[held], frozen[name][held])
    with pytest.raises(NonFiniteLoss, match="are not finite"):
        nesting.write("never.safetensors")


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(InfeasibleTraining, match="sparsities must fall"):
        Nesting(run.model, None, "50,90")
    with pytest.raises(InfeasibleTraining, match="no parameter matches"):
        Nesting(run.model, None, "50", prune="nothing")
    with pytest.raises(InfeasibleTraining, match="no more than"):
        Nesting(nn.Linear(4, 4), None, "99,98")
    nesting = Nesting(run.model, run.optimizer, "90,50")
    with pytest.raises(TrainError, match="sparsify comes before freeze"):
        nesting.freeze()
    nesting.sparsify(GRADUAL)
    with pytest.raises(TrainError, match="is being made already"):
        nesting.sparsify()
    with pytest.raises(TrainError, match="freeze comes before densify"):
        nesting.densify()
    run.train(3)
    with pytest.raises(TrainError, match="after 3 steps, but its schedule ends at 6"):
        nesting.freeze()
    run.train(3)
    nesting.freeze()
    with pytest.raises(TrainError, match="1 of 2 levels are frozen"):
        nesting.write(tmp_path / "net.safetensors")
    other = Nesting(Net(), None, "90,40")
    with pytest.raises(TrainError, match="of another training"):
        other.load_state_dict(nesting.state_dict())
    unwatched = torch.optim.AdamW(run.model.parameters())
    for p in run.model.parameters():
        p.grad = torch.ones_like(p)
    unwatched.step()
    with pytest.raises(FrozenWeightChanged, match="is the optimizer that trains them watched"):
        nesting.sparsify()
    with torch.device("meta"), pytest.raises(TrainError, match="meta device"):
        Nesting(nn.Linear(4, 4), None, "50")


def test_a_level_that_misses_its_budget_is_refused_and_not_frozen() -> None:
    model = nn.Linear(100, 10)
    nesting = Nesting(model, None, "90,50")
    nesting.sparsify()
    with torch.no_grad():  # by an optimizer that nobody watches
        model.weight.add_(0.5)
    with pytest.raises(MissedBudget, match="has 1000 nonzero prunable weights, expected 100;"):
        nesting.freeze()
    assert not any(n.any() for n in nesting.counters.values())
    with torch.no_grad():
        model.weight.view(-1)[100:] = 0
    nesting.freeze()
    nesting.sparsify()  # nothing was trained, so nothing but what is frozen is left
    with pytest.raises(MissedBudget, match="has 100 nonzero prunable weights, expected 500;"):
        nesting.freeze()
    with torch.no_grad():
        model.weight.view(-1)[100:500] = 0.5
    assert nesting.freeze().nonzero == 510


def test_a_level_that_is_the_one_before_is_refused() -> None:
    """Though it is within the slack."""
    nesting = Nesting(nn.Linear(100, 10), None, "50.1,50")
    nesting.sparsify()
    nesting.freeze()
    nesting.sparsify()
    with pytest.raises(MissedBudget, match="level 50%: adds no nonzero weights to the 499 that"):
        nesting.freeze()


class Silent(nn.Module):
    """Hidden channels that a negative bias keeps silent once they have lost their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 4)
        nn.init.constant_(self.first.bias, -0.05)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(torch.relu(self.first(x)))
        return logits


def silent_run(
    fresh: Callable[[], nn.Module] | None, schedule: Schedule = GRADUAL, interrupt: bool = False
) -> Nesting:
    torch.manual_seed(0)
    model = Silent()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    nesting = Nesting(model, optimizer, "95,50", fresh=fresh)
    for _ in nesting.levels:
        nesting.sparsify(schedule)
        for step in range(8):
            if interrupt and step == 4:  # a resumed run has revived already
                state = nesting.state_dict()
                nesting.load_state_dict(state)
            x = torch.randn(16, 20, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(16) % 4).backward()
            optimizer.step()
        nesting.freeze()
    return nesting


def test_weights_that_stayed_at_zero_are_drawn_anew() -> None:
    with pytest.raises(MissedBudget, match="expected 192; where there are fewer, they are exactly"):
        silent_run(None)
    made = []

    def fresh() -> nn.Module:
        made.append(Silent())
        return made[-1]

    nesting = silent_run(fresh, interrupt=True)
    assert len(made) == 2  # once a level
    assert sum(int((nesting.counters[n] > 0).sum()) for n in nesting.prunable) == 192


def test_reviving_is_that_of_the_jax_trainer() -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from elsa_train import revive

    def arrays(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: jax.numpy.asarray(t.detach().numpy()) for name, t in tensors.items()}

    torch.manual_seed(0)
    nesting = Nesting(Silent(), None, "95,50")
    nesting.sparsify()
    nesting.freeze()
    with torch.no_grad():  # of the free weights some have been trained, some are -0
        for name, p in nesting.params.items():
            some = torch.tensor([0.0, -0.0, 1e-42, 2.0])[torch.randint(4, p.shape)]
            p.copy_(torch.where(nesting.counters[name] == 0, some, p))
    other = Silent()
    expected = revive(
        arrays(nesting.params), arrays(dict(other.named_parameters())), arrays(nesting.counters)
    )
    nesting.fresh = lambda: other
    with torch.no_grad():
        nesting._revive()
    for name, p in nesting.params.items():
        assert content(p) == np.asarray(expected[name]).tobytes()
    nesting.fresh = Net
    with pytest.raises(TrainError, match=r"first\.weight: found none in what fresh has made"):
        nesting.sparsify()


def test_buffers_that_change_after_they_were_shared_are_noticed(tmp_path: Path) -> None:
    run = Run()
    run.model.fc.bias.requires_grad_(False)  # constant, so shared by all levels
    nesting = Nesting(run.model, run.optimizer, "50")
    nesting.sparsify()
    nesting.freeze()
    run.model.fc.bias.data.add_(1)
    with pytest.raises(NotReproduced):
        nesting.write(tmp_path / "net.safetensors")


def test_training_needs_no_jax() -> None:
    code = "import sys, elsa_train.torch; print({'jax', 'optax'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_embedding_is_that_of_the_format(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    rng = torch.Generator().manual_seed(0)
    special = [0.0, -0.0, info.tiny, -info.tiny, info.max, info.min, 1.0, 2 - info.eps, info.eps]
    x = torch.cat([torch.tensor(special, dtype=dtype), torch.randn(4000, generator=rng).to(dtype)])
    for bits in (1, 2, 3, 7):
        stored = flush(x, bits)
        arrays = elsa_torch.arrays({"x": stored})["x"]
        for counter in {0, 1, (1 << bits) - 1}:
            steps = np.where(arrays != 0, counter, 0)
            expected = elsa_format.embed_counters(arrays, steps, bits)
            found = torch.where(stored != 0, embed(stored, counter, bits), stored)
            assert elsa_torch.arrays({"x": found})["x"].tobytes() == expected.tobytes()


def test_selection_is_exact() -> None:
    rng = np.random.default_rng(0)
    for trial in range(40):
        sizes = [(7, 5), (0, 3), (11,)] if trial % 2 else [(60,)]
        # Few values, so that there are many ties.
        scores = [torch.from_numpy(rng.integers(-3, 4, s).astype(np.float32)) for s in sizes]
        frozen = [torch.from_numpy(rng.random(s) < 0.1) for s in sizes]
        if trial % 5 == 0:
            scores[0].view(-1)[3] = torch.nan
        ranked = [keys(s, f) for s, f in zip(scores, frozen, strict=True)]
        flat = np.concatenate([k.numpy().reshape(-1) for k in ranked])
        assert (flat[np.concatenate([f.numpy().reshape(-1) for f in frozen])] == FROZEN).all()
        for budget in {1, int(rng.integers(1, flat.size)), flat.size - 1, flat.size}:
            best = np.argsort(-flat.astype(np.int64), kind="stable")[:budget]
            expected = np.zeros(flat.size, bool)
            expected[best] = True
            found = np.concatenate([k.numpy().reshape(-1) for k in select(ranked, budget)])
            assert np.array_equal(found, expected)


def test_selection_in_blocks_is_exact() -> None:
    k = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (3, 8, 5))).int()
    kept = select_blocks(k, Pattern(2, 4), 1)
    for i in range(3):
        for j in range(5):
            for block in (0, 4):
                part = k[i, block : block + 4, j].numpy()
                best = set(np.argsort(-part, kind="stable")[:2])
                found = set(np.flatnonzero(kept[i, block : block + 4, j].numpy()))
                assert found == best


@pytest.mark.parametrize("level", ["90", "2:4"])
def test_masks_are_those_of_the_jax_trainer(level: str) -> None:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from elsa_train import Pruner, Scope, parse_levels

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 12, bias=False), nn.Linear(16, 8, bias=False))
    params = {n: jax.numpy.asarray(p.detach().numpy()) for n, p in model.named_parameters()}
    n = {name: jax.numpy.zeros(p.shape, jax.numpy.uint8) for name, p in params.items()}
    (wanted,) = parse_levels(level)
    scope = Scope("nm" if wanted.pattern else "global", prune="weight$")
    pruner = Pruner(scope, wanted, GRADUAL)
    for step in (2, 4, 6):
        nesting = Nesting(model, None, level)
        nesting.schedule, nesting.step = GRADUAL, step
        nesting._prune()
        expected = pruner.mask(params, None, n, step)
        for name in params:
            free = nesting._free.get(name, torch.ones(params[name].shape))
            assert np.array_equal(free.numpy() != 0, np.asarray(expected[name]))


def test_no_warning_of_pytorch() -> None:
    run = Run()
    nesting = Nesting(run.model, run.optimizer, "90,50")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_all(run, nesting)


def test_parameters_that_are_not_the_modules_any_more() -> None:
    """They would be frozen and written, whatever the module has."""
    run = Run()
    nesting = Nesting(run.model, run.optimizer, levels="80,50")
    nesting.sparsify()
    nesting.freeze()
    run.model.fc.weight = nn.Parameter(torch.randn(16, 8))
    with pytest.raises(TrainError, match=r"fc\.weight: was replaced in the module"):
        nesting.densify()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_cast_is_an_error_at_the_next_step(dtype: torch.dtype) -> None:
    run = Run()
    nesting = Nesting(run.model, run.optimizer, levels="80,50")
    nesting.sparsify()
    nesting.freeze()
    run.model.to(dtype)
    with pytest.raises(TrainError, match=r"was torch\.float32 and is torch\.float"):
        run.optimizer.step()


def test_states_of_something_else() -> None:
    run = Run()
    nesting = Nesting(run.model, run.optimizer, levels="80,50")
    nesting.sparsify()
    nesting.freeze()
    state = nesting.state_dict()
    other = Run()
    fresh = Nesting(other.model, other.optimizer, levels="80,50")
    shapes = {name: n[:1] for name, n in state["counters"].items()}
    for wrong, words in (
        ({}, "not a state"),
        (state | {"levels": ["90%", "50%"]}, "of another training"),
        (state | {"counters": shapes}, "of another training"),
        (state, "frozen weights are not those of the state; load the module's first"),
    ):
        with pytest.raises(TrainError, match=words):
            fresh.load_state_dict(wrong)
        assert not any(bool(n.any()) for n in fresh.counters.values())
    other.model.load_state_dict(run.model.state_dict())
    fresh.load_state_dict(state)
    assert len(fresh.frozen) == 1


def test_two_optimizers_one_of_which_counts() -> None:
    model = Run().model
    first = torch.optim.SGD(model.conv.parameters(), 0.1)
    second = torch.optim.SGD(model.fc.parameters(), 0.1, weight_decay=0.1)
    nesting = Nesting(model, first, levels="80,50")
    nesting.watch(second, counts=False)
    nesting.sparsify()
    nesting.freeze()
    before = model.fc.weight.detach().clone()
    for _ in range(3):
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        first.step()
        second.step()
    assert nesting.step == 3
    nesting.densify()  # would find frozen weights that changed
    assert not torch.equal(before, model.fc.weight)


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_wrapped_modules_have_the_names_of_plain_ones(wrap: Any, tmp_path: Path) -> None:
    run = Run()
    nesting = Nesting(wrap(run.model), run.optimizer, levels="80,50", fresh=Net)
    for _ in nesting.levels:
        nesting.sparsify()
        run.train(2)
        nesting.freeze()
    nesting.write(tmp_path / "net.safetensors")
    assert decode(tmp_path / "net.safetensors", None).keys() < run.model.state_dict().keys()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scope": "layer"}, "scope 'layer', expected 'global' or 'uniform'"),
        ({"prune": "("}, "is not a regular expression"),
        ({"exclude": "["}, "is not a regular expression"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainError, match=words):
        Nesting(Net(), None, levels="80,50", **options)
