"""A fine-tune of all levels: masks stay, levels come nearer, and what is written is what was."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import elsa_converters.torch as elsa_torch
import numpy as np
import pytest
import torch
from decoder import content
from internals import BadData, BadRecipe, TrainError
from torch import Tensor, nn

import elsa_format
from elsa_format import OutputExists, read_counters
from elsa_train.torch import FinetuneOptions, FinetuneReport, Nesting, Student, finetune

LEVELS = (1, 2, "dense")
pytestmark = pytest.mark.filterwarnings("ignore:the dense network's loss")


class Net(nn.Module):
    """A convolution with statistics, dropout, an embedding-like matrix that is not nested."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm: nn.Module = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).amax((2, 3))
        logits: Tensor = self.head(self.drop(torch.relu(self.fc(hidden))))
        return logits


def network(dtype: torch.dtype = torch.float32, norm: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = Net(norm)
    model.train()
    with torch.no_grad():
        for batch in inputs(20):
            model(batch)
        model.head.weight.mul_(20)
    return model.to(dtype).eval()


def inputs(count: int, size: int = 16, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(size, 1, 8, 8, generator=rng) for _ in range(count)]


def pack(model: nn.Module, path: Path, sparsities: Any = (80, 50)) -> Path:
    elsa_format.pack(model.state_dict(), path, sparsities=sparsities, exclude=["head.weight"])
    return path


def contents(model: nn.Module) -> dict[str, bytes]:
    return {name: content(tensor) for name, tensor in model.state_dict().items()}


def tune(model: nn.Module, folder: Path, name: str = "out", **fields: Any) -> FinetuneReport:
    net = folder / "net.safetensors"
    if not net.exists():
        pack(model, net)
    fields = {"steps": 40, "classes": "logits", "rate": 5e-3} | fields
    batches = fields.pop("batches", None) or inputs(48)
    return finetune(model, net, batches, out=folder / f"{name}.safetensors", **fields)


def counters_of(path: Path) -> dict[str, Any]:
    with elsa_format.open(path) as file:
        dense = file.load("dense")
        return {name: read_counters(dense[name], file.bits).tolist() for name in file.nested}


def test_levels_come_nearer_and_masks_stay(tmp_path: Path) -> None:
    model = network()
    model.train()
    before = contents(model)
    report = tune(model, tmp_path)
    assert contents(model) == before
    assert all(module.training for module in model.modules())
    assert report.after[1]["loss"] < 0.5 * report.before[1]["loss"]
    for t in (1, 2):
        assert report.after[t]["loss"] < report.before[t]["loss"]
        assert report.after[t]["agreement"] > report.before[t]["agreement"]
    assert counters_of(tmp_path / "out.safetensors") == counters_of(tmp_path / "net.safetensors")
    with elsa_format.open(tmp_path / "net.safetensors") as old:
        found = [(level.name, level.target, level.nonzero) for level in old.levels]
    with elsa_format.open(tmp_path / "out.safetensors") as file:
        assert [(level.name, level.target, level.nonzero) for level in file.levels] == found
        own = ("conv.bias", "fc.bias", "head.bias", "norm.bias", "norm.running_mean")
        assert sorted(file.per_level) == sorted((*own, "norm.running_var", "norm.weight"))
        assert file.levels[0].metrics["agreement"] == report.after[1]["agreement"]
        number = file.load("dense")["norm.num_batches_tracked"]
    assert content(model.state_dict()["norm.num_batches_tracked"]) == number.tobytes()
    assert elsa_format.verify(tmp_path / "out.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_file_is_what_was_measured(dtype: torch.dtype, tmp_path: Path) -> None:
    model = network(dtype)
    batches = [batch.to(dtype) for batch in inputs(48)]
    report = tune(model, tmp_path, batches=batches)
    wanted = torch.cat([model(batch) for batch in batches[:8]]).argmax(1)
    loaded = network(dtype)
    for level in LEVELS:
        elsa_torch.load_level(loaded, tmp_path / "out.safetensors", level)
        found = torch.cat([loaded(batch) for batch in batches[:8]]).argmax(1)
        same = float((found == wanted).double().mean())
        assert same == pytest.approx(report.after[level]["agreement"])
    with elsa_format.open(tmp_path / "out.safetensors") as file:
        assert file.tensors["fc.weight"].dtype.name == {4: "F32", 2: "BF16"}[dtype.itemsize]


OPTIONS: dict[str, dict[str, Any]] = {
    "one": {"each": "one"},
    "shares": {"each": "one", "shares": (2, 1, 1)},
    "amp": {"amp": torch.bfloat16},
    "half": {"amp": torch.float16},
    "accumulate": {"accumulate": 2, "steps": 30},
    "ema": {"ema": 0.8},
    "hidden": {"hidden": "^fc$"},
    "outputs": {"classes": None},
    "temperature": {"temperature": 2.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, tmp_path: Path) -> None:
    model = network()
    report = tune(model, tmp_path, **OPTIONS[name])
    assert report.after[1]["relative_error"] < 0.9 * report.before[1]["relative_error"]


def test_labels_are_mixed_in(tmp_path: Path) -> None:
    model = network()
    labels = torch.arange(16) % 5
    pairs = [(batch, labels) for batch in inputs(48)]
    tune(model, tmp_path, batches=pairs, labels=1.0, steps=60)
    named = [{"x": batch, "labels": labels} for batch in inputs(48)]
    tune(model, tmp_path, "named", batches=named, labels=1.0, steps=60)
    names = [tmp_path / f"{name}.safetensors" for name in ("out", "named")]
    assert names[0].read_bytes() == names[1].read_bytes()
    level = network()
    elsa_torch.load_level(level, names[0], 2)
    loss = nn.functional.cross_entropy
    with torch.no_grad():
        found, wanted = (
            float(np.mean([loss(net(x), labels).item() for x in inputs(8)]))
            for net in (level, model)
        )
    assert found < wanted  # than the original, which has never seen these labels
    with pytest.raises(BadData, match="expected a mapping with 'labels'"):
        tune(model, tmp_path, "none", batches=[{"x": x} for x in inputs(48)], labels=0.5)


def test_biases_and_norms_alone_leave_the_dense_network(tmp_path: Path) -> None:
    report = tune(network(), tmp_path, train="own")
    assert report.after[1]["loss"] < report.before[1]["loss"]
    with (
        elsa_format.open(tmp_path / "net.safetensors") as old,
        elsa_format.open(tmp_path / "out.safetensors") as new,
    ):
        before, after = old.load("dense"), new.load("dense")
        assert {name: array.tobytes() for name, array in after.items()} == {
            name: array.tobytes() for name, array in before.items()
        }


def test_weights_that_a_level_has_not_are_not_moved_by_it(tmp_path: Path) -> None:
    model = network()
    student = Nesting.from_file(model, pack(model, tmp_path / "net.safetensors"))
    student.loss(inputs(1)[0], 1).backward()
    for name, n in student.counters.items():
        gradient = student.shared[name].grad
        assert gradient is not None
        assert bool((gradient[n != 1] == 0).all())
        assert bool((gradient[n == 1] != 0).any())
    assert student.own[0]["fc.bias"].grad is not None
    assert student.own[1]["fc.bias"].grad is None


def test_a_step_has_the_sparsest_the_dense_network_and_one_between(tmp_path: Path) -> None:
    model = network()
    net = pack(model, tmp_path / "net.safetensors", (90, 80, 70, 50))
    student = Student(model, net)
    steps = [student.drawn(step) for step in range(9)]
    assert all((step[0], step[2]) == (1, "dense") for step in steps)
    assert sorted(step[1] for step in steps) == [2, 2, 2, 3, 3, 3, 4, 4, 4]
    student = Student(model, net, FinetuneOptions(each="one"))
    drawn = [student.drawn(step)[0] for step in range(34)]
    assert [drawn.count(level) for level in student.numbers] == [13, 8, 5, 4, 4]


@pytest.mark.parametrize("each", ["one", "sandwich"])
def test_the_dense_network_is_bounded(each: str, tmp_path: Path) -> None:
    """By its own loss on what is held back: its share of the loss doubles while it is above."""
    model, found = network(), []
    for bound in (None, 1e-4):
        report = tune(model, tmp_path, str(bound), dense_bound=bound, each=each, steps=80)
        found.append(report.after["dense"]["loss"])
    assert found[1] < found[0]


def test_a_dense_network_above_its_bound_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="above dense_bound=1e-09: give it a lower rate"):
        tune(network(), tmp_path, dense_bound=1e-9, steps=2)


def test_accumulated_batches_are_one_batch(tmp_path: Path) -> None:
    model = network(norm=False)
    whole, halves = inputs(20, 16), [half for x in inputs(20, 16) for half in x.split(8)]
    common: dict[str, Any] = {"steps": 6, "validation": inputs(2), "seed": 3}
    tune(model, tmp_path, "whole", batches=whole, **common)
    tune(model, tmp_path, "halves", batches=halves, accumulate=2, **common)
    one, other = (
        elsa_torch.state_dict(tmp_path / f"{name}.safetensors") for name in ("whole", "halves")
    )
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)


SCRIPT = """
import os, signal, sys
sys.path[:0] = [{here!r}, {tests!r}]
import torch
from pathlib import Path
from test_finetune import network, tune
at = int(sys.argv[2])
kill = lambda done, steps: done == at and os.kill(os.getpid(), signal.SIGKILL)
folder = Path(sys.argv[1])
tune(network(), folder, state=folder / "state.pt", save_every=7, progress=kill, **OPTIONS)
"""


def run(folder: Path, at: int, options: str) -> int:
    here = Path(__file__).parent
    script = SCRIPT.format(here=str(here), tests=str(here.parent)).replace("OPTIONS", options)
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(at)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode > 0:
        pytest.fail(done.stderr)
    return done.returncode


def test_killed_and_resumed_it_writes_the_same_bytes(tmp_path: Path) -> None:
    options = "dict(ema=0.9, dense_bound=1e-4, each='one')"
    (tmp_path / "whole").mkdir()
    tune(network(), tmp_path / "whole", ema=0.9, dense_bound=1e-4, each="one")
    (tmp_path / "parts").mkdir()
    assert run(tmp_path / "parts", 17, options) < 0
    assert (tmp_path / "parts" / "state.pt").exists()
    assert not (tmp_path / "parts" / "out.safetensors").exists()
    with pytest.raises(TrainError, match="is the state of another fine-tune"):
        tune(network(), tmp_path / "parts", state=tmp_path / "parts" / "state.pt")
    assert run(tmp_path / "parts", -1, options) == 0
    assert not (tmp_path / "parts" / "state.pt").exists()
    whole, parts = (tmp_path / name / "out.safetensors" for name in ("whole", "parts"))
    assert parts.read_bytes() == whole.read_bytes()


GROUP = """
import os, sys
sys.path[:0] = [{here!r}, {tests!r}]
import torch.distributed as dist
from pathlib import Path
from test_finetune import inputs, network, tune
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{{folder}}/group", rank=rank, world_size=2)
halves = [x.split(8)[rank] for x in inputs(20)]
held = [x.split(16)[rank] for x in inputs(2, 32)]
tune(network(norm=False), folder, batches=halves, validation=held, steps=6, seed=3)
dist.destroy_process_group()
"""


def test_two_processes_are_one(tmp_path: Path) -> None:
    """With half of each batch, and half of what is held back."""
    model, here = network(norm=False), Path(__file__).parent
    script = GROUP.format(here=str(here), tests=str(here.parent))
    pack(model, tmp_path / "net.safetensors")
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path), str(rank)], stderr=-1)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    tune(model, tmp_path, "alone", batches=inputs(20), validation=inputs(2, 32), steps=6, seed=3)
    one, other = (tmp_path / f"{name}.safetensors" for name in ("out", "alone"))
    found, wanted = elsa_torch.state_dict(one), elsa_torch.state_dict(other)
    assert all(torch.allclose(found[name], wanted[name], atol=1e-5) for name in wanted)
    with elsa_format.open(one) as file, elsa_format.open(other) as expected:
        metrics = [dict(opened.levels[0].metrics) for opened in (file, expected)]
    assert metrics[0]["agreement"] == pytest.approx(metrics[1]["agreement"])


def test_a_loop_of_ones_own_in_data_parallel(tmp_path: Path) -> None:
    """The module is called as any other, so what wraps modules wraps it."""
    import torch.distributed as processes

    model = network()
    student = Nesting.from_file(
        model, pack(model, tmp_path / "net.safetensors"), FinetuneOptions(classes="logits")
    )
    before = student.measure(inputs(2))
    processes.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        wrapped = nn.parallel.DistributedDataParallel(student, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=5e-3)
        for student.step, batch in enumerate(inputs(40)):
            optimizer.zero_grad()
            wrapped(batch)["loss"].backward()
            optimizer.step()
    finally:
        processes.destroy_process_group()
    student.write(tmp_path / "out.safetensors", metadata={"by": "a loop"})
    assert student.measure(inputs(2))[1]["loss"] < 0.7 * before[1]["loss"]
    with elsa_format.open(tmp_path / "out.safetensors") as file:
        assert file.metadata["by"] == "a loop"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        del attention_mask
        hidden = self.embed(input_ids)
        return {"logits": self.head(hidden + torch.relu(self.mix(hidden)))}


def test_tied_weights_and_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    net = tmp_path / "net.safetensors"
    elsa_format.pack(model.state_dict(), net, sparsities=[90, 50], include=["mix.weight"])

    def batch(seed: int, word: int) -> dict[str, Tensor]:
        words = torch.randint(1, 20, (8, 6), generator=torch.Generator().manual_seed(seed))
        mask = (torch.arange(6) < 4).long().expand(8, 6)
        return {"input_ids": torch.where(mask.bool(), words, word), "attention_mask": mask}

    for word in (0, 7):  # what stands where there is no word does not matter
        out = tmp_path / f"{word}.safetensors"
        finetune(model, net, [batch(i, word) for i in range(20)], steps=10, out=out)
    files = [tmp_path / f"{word}.safetensors" for word in (0, 7)]
    assert files[0].read_bytes() == files[1].read_bytes()
    loaded = Tied()
    elsa_torch.load_level(loaded, files[0], 1)
    assert loaded.head.weight is loaded.embed.weight
    assert not torch.equal(loaded.embed.weight, model.embed.weight)


class Judging(Tied):
    """Says what its loss is, as language models do, whose labels are shifted."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        found = super().forward(input_ids, input_ids)
        if labels is not None:
            found["loss"] = nn.functional.cross_entropy(
                found["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            )
        return found


def test_a_model_says_what_the_loss_of_labels_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, net = Judging(), tmp_path / "net.safetensors"
    elsa_format.pack(model.state_dict(), net, sparsities=[50], include=["mix.weight"])
    words = torch.randint(0, 20, (8, 6))
    student = Student(model, net, FinetuneOptions(labels=1.0))
    found = student.loss({"input_ids": words, "labels": words}, "dense").detach()
    assert float(found) == pytest.approx(float(model(words, words)["loss"].detach()), rel=1e-5)


def test_weights_that_reach_zero_stay_in_their_level(tmp_path: Path) -> None:
    model = network()
    student = Student(model, pack(model, tmp_path / "net.safetensors"))
    with torch.no_grad():
        student.shared["fc.weight"].zero_()
    student.write(tmp_path / "out.safetensors")
    assert counters_of(tmp_path / "out.safetensors") == counters_of(tmp_path / "net.safetensors")


def test_what_is_refused(tmp_path: Path) -> None:
    model = network()
    net, out = pack(model, tmp_path / "net.safetensors"), tmp_path / "out.safetensors"
    del (other := dict(model.state_dict()))["conv.bias"]
    more = model.state_dict() | {"more": torch.randn(9, 9)}
    for name, tensors in (("fewer", other), ("more", more)):
        elsa_format.pack(tensors, tmp_path / name, sparsities=[50])
    elsa_format.extract(net, tmp_path / "level", level=1)
    for name, message in {
        "fewer": r"tensor 'conv.bias': found none, the model has \[8\]",
        "more": "tensor 'more': the model has none of this name",
        "level": "expected an ELSA file with all its levels",
    }.items():
        with pytest.raises(TrainError, match=message):
            Student(model, tmp_path / name)
    with pytest.raises(BadData, match="batches: there are too few"):
        finetune(model, net, iter(inputs(10)), steps=5, out=out)
    with pytest.raises(BadData, match="none to measure levels on"):
        finetune(model, net, inputs(10), steps=5, out=out, validation=[])
    with pytest.raises(BadRecipe, match="each='two': expected 'sandwich' or 'one'"):
        finetune(model, net, inputs(10), steps=5, out=out, each="two")
    with pytest.raises(BadRecipe, match="steps=0, save_every=100: expected 1 or more"):
        finetune(model, net, inputs(10), steps=0, out=out)
    with pytest.raises(TrainError, match="hidden='nothing': no module has such a name"):
        finetune(model, net, inputs(10), steps=5, out=out, hidden="nothing")
    with pytest.raises(TrainError, match="expected 3 whole numbers"):
        finetune(model, net, inputs(10), steps=5, out=out, each="one", shares=(1, 1))
    assert not out.exists()
    out.touch()
    with pytest.raises(OutputExists):
        finetune(model, net, iter(()), steps=5, out=out)


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    from internals import NonFiniteLoss

    batches = [*inputs(10), *([inputs(1)[0] * torch.nan] * 3)]
    with pytest.raises(NonFiniteLoss, match="step 2: the gradient is not finite"):
        tune(network(), tmp_path, batches=batches, steps=5)


def generator() -> Iterator[Tensor]:
    yield from inputs(30)


def test_batches_may_come_once(tmp_path: Path) -> None:
    tune(network(), tmp_path, "list", batches=inputs(30), steps=20)
    tune(network(), tmp_path, "generator", batches=generator(), steps=20)
    one, other = (tmp_path / f"{name}.safetensors" for name in ("list", "generator"))
    assert one.read_bytes() == other.read_bytes()
