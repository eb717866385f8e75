"""A level as a state dict, in a module's memory, and on the meta device."""

from pathlib import Path

import numpy as np
import pytest
import torch
from decoder import content, decode
from elsa_converters.torch import attach, load_level, state_dict
from torch import nn

import elsa_format
from elsa_format import (
    ChecksumMismatch,
    InvalidOption,
    NoSuchLevel,
    NotElsa,
    TensorMismatch,
)

NESTABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Net(nn.Module):
    """Nested tensors, tied ones, statistics, and a name beyond ASCII."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16, dtype=dtype)
        self.conv = nn.Conv2d(3, 8, 3, dtype=dtype)
        self.norm = nn.BatchNorm2d(8, dtype=dtype)
        self.größe = nn.Linear(16, 32, dtype=dtype)
        self.head = nn.Linear(16, 40, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


def random_net(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    net = Net(dtype)
    for p in net.parameters():
        nn.init.normal_(p)
    return net


def pack(net: nn.Module, path: Path, **options: object) -> Path:
    elsa_format.pack(net.state_dict(), path, sparsities=[90, 50], **options)  # type: ignore[arg-type]
    return path


def at(net: nn.Module) -> dict[str, bytes]:
    return {name: content(t) for name, t in net.state_dict().items()}


def same(found: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    """Equal but for the second name of the tied tensor, which the file has once."""
    return found == {**expected, "head.weight": expected["embed.weight"]}


@pytest.mark.parametrize("dtype", NESTABLE, ids=str)
@pytest.mark.parametrize("level", [1, 2, None])
def test_a_level_is_exact(dtype: torch.dtype, level: int | None, tmp_path: Path) -> None:
    path = pack(random_net(dtype), tmp_path / "net.safetensors")
    expected = decode(path, level)
    wanted = "dense" if level is None else level
    loaded = state_dict(path, wanted)
    assert same({name: content(t) for name, t in loaded.items()}, expected)
    assert loaded["conv.weight"].dtype == dtype

    net = random_net(dtype, seed=1)
    memory = {name: t.data_ptr() for name, t in net.state_dict().items()}
    assert load_level(net, path, wanted) == ([], [])
    assert same(at(net), expected)
    assert {name: t.data_ptr() for name, t in net.state_dict().items()} == memory

    with torch.device("meta"):
        empty = Net()
    load_level(empty, path, wanted)
    assert same(at(empty), expected)
    assert empty.head.weight is empty.embed.weight
    assert empty.embed.weight.requires_grad
    net.load_state_dict(loaded)


def test_shared_tensors_of_every_dtype(tmp_path: Path) -> None:
    bits = torch.arange(64, dtype=torch.uint8)
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn]
    dtypes += [torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz]
    dtypes += [torch.float8_e5m2fnuz, torch.bfloat16, torch.float16]
    tensors = {str(dtype): bits.clone().view(dtype) for dtype in dtypes if dtype != torch.bool}
    tensors |= {"bool": bits > 3, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    tensors |= {"odd": torch.tensor([float("nan"), -0.0, 1e-42, float("-inf")])}
    layer = torch.randn(16, 16)
    path = tmp_path / "net.safetensors"
    elsa_format.pack({**tensors, "layer": layer}, path, sparsities=[50], exclude="empty")
    loaded = state_dict(path, 1)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert content(loaded[name]) == content(tensor)


def test_a_level_is_masked_before_a_cast(tmp_path: Path) -> None:
    path = pack(random_net(torch.bfloat16), tmp_path / "net.safetensors")
    net = random_net(torch.float32, seed=1)
    load_level(net, path, 1)
    expected = {name: t.to(torch.float32) for name, t in state_dict(path, 1).items()}
    assert content(net.conv.weight) == content(expected["conv.weight"])
    assert net.conv.weight.dtype == torch.float32


def test_layout_in_memory_is_kept(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1).to(memory_format=torch.channels_last)
    assert not net.conv.weight.is_contiguous()
    load_level(net, path, 2)
    assert net.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert same(at(net), decode(path, 2))


def test_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    pack(random_net(torch.bfloat16), index, max_shard_size=1000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    net = random_net(torch.bfloat16, seed=1)
    load_level(net, tmp_path, 2)  # the directory
    assert same(at(net), decode(index, 2))


def test_statistics_of_a_level(tmp_path: Path) -> None:
    nets = []
    dense = random_net()
    for keep in (0.1, 0.5):
        net = random_net()
        for p in (net.conv.weight, net.embed.weight, net.größe.weight):
            p.data[p.abs() < p.abs().flatten().kthvalue(int(p.numel() * (1 - keep))).values] = 0
        net.norm.running_mean.fill_(keep)
        nets.append(net)
    path = tmp_path / "net.safetensors"
    elsa_format.pack(
        dense.state_dict(),
        path,
        levels=[net.state_dict() for net in nets],
        per_level="norm.running_*",
    )
    net = random_net(seed=1)
    for level, mean in ((1, 0.1), (2, 0.5), ("dense", 0.0)):
        load_level(net, path, level)
        assert np.allclose(net.norm.running_mean, mean)
        assert same(at(net), decode(path, level if isinstance(level, int) else None))


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1)
    net.conv = nn.Conv2d(3, 8, 5)
    before = at(net)
    with pytest.raises(TensorMismatch, match=r"'conv.weight': shape \[8, 3, 3, 3\], the model has"):
        load_level(net, path, 1)
    assert at(net) == before
    net = random_net(seed=1)
    net.more = nn.Linear(2, 2)
    before = at(net)
    with pytest.raises(TensorMismatch, match=r"only the model has 'more\.weight' and 1 more"):
        load_level(net, path, 1)
    del net.more, net.norm
    with pytest.raises(TensorMismatch, match=r"only the file has 'norm\."):
        load_level(net, path, 1)
    with pytest.raises(NoSuchLevel):
        load_level(net, path, 3)
    assert {name: before[name] for name in at(net)} == at(net)
    missing, unexpected = load_level(net, path, 1, strict=False)
    assert (missing, len(unexpected)) == ([], 5)


def test_two_stored_tensors_for_one_of_the_model(tmp_path: Path) -> None:
    net = random_net()
    weight = net.embed.weight.detach()
    state = {**net.state_dict(), "head.weight": weight.clone()}
    path = tmp_path / "net.safetensors"
    elsa_format.pack(state, path, sparsities=[50], scope="uniform")
    load_level(net, path, 1)  # stored twice, but the same
    elsa_format.pack(
        {**state, "head.weight": weight + 1}, path, sparsities=[50], scope="uniform", force=True
    )
    with pytest.raises(TensorMismatch, match="differ, but are one in the model"):
        load_level(net, path, 1)


def test_wrappers_are_seen_through(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1)
    load_level(nn.DataParallel(torch.compile(net)), path, 1)
    assert same(at(net), decode(path, 1))


def test_autograd_notices(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net()
    x = torch.randn(4, 16, requires_grad=True)
    loss = net.größe(x).square().sum()
    load_level(net, path, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        frozen = random_net()
    load_level(frozen, path, 1)
    assert same(at(frozen), decode(path, 1))


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 64
    path.write_bytes(raw)
    with pytest.raises(ChecksumMismatch):
        load_level(random_net(), path, 1)
    with pytest.raises(ChecksumMismatch):
        state_dict(path, 1)
    with torch.device("meta"):
        empty = Net()
    with pytest.raises(ChecksumMismatch):
        load_level(empty, path, 1)
    assert all(p.is_meta for p in empty.parameters())
    state_dict(path, 1, verify=False)


@pytest.mark.parametrize("layout", ["dense", "bitmask", "csr"])
def test_the_file_of_a_level(layout: str, tmp_path: Path) -> None:
    path = pack(random_net(torch.bfloat16), tmp_path / "net.safetensors")
    elsa_format.extract(path, tmp_path / "level.safetensors", level=2, layout=layout)
    net = random_net(torch.bfloat16, seed=1)
    load_level(net, tmp_path / "level.safetensors", 2)
    assert same(at(net), decode(path, 2))
    with pytest.raises(NoSuchLevel):
        load_level(net, tmp_path / "level.safetensors", 1)
    with pytest.raises(InvalidOption, match="holds one level only"):
        attach(net, tmp_path / "level.safetensors", 2)


def test_sources_that_hold_no_levels(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(IsADirectoryError, match=r"holds no \.safetensors file"):
        state_dict(tmp_path)
    save_file({"a": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(NotElsa):
        state_dict(tmp_path)
    with pytest.raises(FileNotFoundError):
        state_dict(tmp_path / "none.safetensors")


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda net: torch.compile(net, backend="eager")])
def test_names_inside_wrappers_and_outside(wrap, tmp_path: Path) -> None:
    """What was saved of a wrapped model has its prefix, `module.` or `_orig_mod.`."""
    inside = pack(random_net(), tmp_path / "inside.safetensors")
    outside = pack(wrap(random_net()), tmp_path / "outside.safetensors")
    for path in (inside, outside):
        net = random_net(seed=1)
        load_level(wrap(net), path, 1)
        assert same(at(net), decode(inside, 1))
        attach(wrap(net), path).use(2)
        assert same(at(net), decode(inside, 2))
    with pytest.raises(TensorMismatch):  # as load_state_dict
        load_level(random_net(), outside, 1)


def test_a_tied_tensor_into_a_model_that_has_two(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1)
    net.head.weight = nn.Parameter(torch.zeros(40, 16))
    levels = attach(net, path, 1)
    assert same(at(net), decode(path, 1))
    levels.use(2)
    assert same(at(net), decode(path, 2))
    assert net.head.weight.data_ptr() != net.embed.weight.data_ptr()


def test_what_cannot_be_written_to_is_refused_first(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    expanded = random_net(seed=1)
    expanded.conv.weight = nn.Parameter(torch.zeros(1, 3, 3, 3).expand(8, 3, 3, 3))
    before = at(expanded)
    with pytest.raises(InvalidOption, match="weight' is expanded"):
        load_level(expanded, path, 1)
    assert at(expanded) == before
    with pytest.raises(InvalidOption, match="'weight' has no shape before the first forward"):
        load_level(nn.LazyLinear(3), path, 1, strict=False)


@pytest.mark.parametrize("source", [None, 5, b"net.safetensors", {}])
def test_what_is_no_source(source: object) -> None:
    with pytest.raises(TypeError, match="expected a path, a URL or a binary stream"):
        load_level(random_net(), source, 1)


class Positions(nn.Linear):
    """Makes a buffer itself, which an older version saved."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.register_buffer("ids", torch.arange(16), persistent=False)
        self.register_buffer("table", torch.eye(16), persistent=False)


@pytest.mark.parametrize("wrap", [lambda net: net, nn.DataParallel])
def test_a_buffer_that_the_model_makes_itself(wrap, tmp_path: Path) -> None:
    old = {**Positions().state_dict(), "ids": torch.zeros(16, dtype=torch.int64)}
    path = tmp_path / "net.safetensors"
    elsa_format.pack(old, path, sparsities=[90, 50])
    net = Positions()
    assert load_level(wrap(net), path, 1) == ([], ["ids"])
    levels = attach(wrap(net), path, 2)
    assert levels.unmatched.unexpected_keys == ["ids"]
    levels.use(1)
    assert net.ids.tolist() == list(range(16))  # the model's, not the file's
    assert content(net.weight) == decode(path, 1)["weight"]
    elsa_format.pack({**old, "table": torch.randn(16, 16)}, path, sparsities=[50], force=True)
    with pytest.raises(TensorMismatch, match="only the file has 'table'"):  # nested: a level of it
        attach(net, path, 1)
    elsa_format.pack({**old, "other": torch.zeros(16)}, path, sparsities=[50], force=True)
    with pytest.raises(TensorMismatch, match="only the file has 'other'"):
        load_level(net, path, 1)
