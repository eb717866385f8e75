"""Levels of a module that runs."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from decoder import content, decode, miscount
from elsa_converters.torch import attach
from test_load_level import at, pack, random_net, same
from torch import nn

import elsa_format
from elsa_format import ChecksumMismatch, CountMismatch, InputChanged, NoSuchLevel, TensorMismatch


def test_switching_is_exact_and_keeps_the_memory(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1)
    memory = {name: t.data_ptr() for name, t in net.state_dict().items()}
    with attach(net, path, 2) as levels:
        assert (levels.level, same(at(net), decode(path, 2))) == (2, True)
        for level in (1, 2, "dense", "90%", "dense", 1):
            levels.use(level)
            number = {"dense": None, "90%": 1}.get(level, level)
            assert same(at(net), decode(path, number))
        with pytest.raises(NoSuchLevel):
            levels.use(3)
        assert levels.level == 1
    assert {name: t.data_ptr() for name, t in net.state_dict().items()} == memory
    assert same(at(net), decode(path, 1))


def test_at_returns_even_after_an_error(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1)
    levels = attach(net, path)

    def fail() -> None:
        with levels.at(1):
            assert same(at(net), decode(path, 1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (levels.level, same(at(net), decode(path, None))) == ("dense", True)


def test_what_was_trained_meanwhile_is_replaced(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1)
    levels = attach(net, path, 1)
    net.conv.weight.data.add_(1)
    levels.use(1)
    assert same(at(net), decode(path, 1))


def test_shards_and_casts(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    pack(random_net(torch.bfloat16), index, max_shard_size=1000)
    same_dtype, wider = random_net(torch.bfloat16, seed=1), random_net(seed=1)
    one, other = attach(same_dtype, tmp_path), attach(wider, index)
    for level in (1, 2, "dense"):
        one.use(level)
        other.use(level)
        assert same(at(same_dtype), decode(index, None if level == "dense" else level))
        assert torch.equal(wider.conv.weight, same_dtype.conv.weight.float())


def test_compiled_modules_switch(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net()
    compiled = torch.compile(net.größe, backend="eager")
    levels, x = attach(net, path), torch.randn(2, 16)
    for level in (1, "dense", 2):
        levels.use(level)
        assert torch.equal(compiled(x), nn.functional.linear(x, net.größe.weight, net.größe.bias))


def test_statistics_switch_with_their_level(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    path = tmp_path / "net.safetensors"
    variants = []
    for t in (1, 2):
        state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        state["1.running_mean"].fill_(t)
        variants.append(state)
    dense = net.state_dict()
    elsa_format.pack(dense, path, levels=variants, per_level="1.running_mean")
    levels = attach(net, path)
    for level, mean in ((1, 1.0), (2, 2.0), ("dense", 0.0)):
        levels.use(level)
        assert net[1].running_mean.tolist() == [mean] * 8


def test_large_tensors_are_switched_in_threads(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3001, 3001, bias=False)  # 36 MB, in chunks that do not divide it
    path = tmp_path / "net.safetensors"
    elsa_format.pack(net.state_dict(), path, sparsities=[90, 50], digests=False)
    levels = attach(net, path)
    for level in (1, 2, "dense"):
        levels.use(level)
        assert content(net.weight) == decode(path, None if level == "dense" else level)["weight"]


def test_words_without_alignment(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    profile = json.loads(header["__metadata__"]["elsa"])
    del profile["header"], profile["checksums"]  # optional, and no longer right
    header["__metadata__"]["elsa"] = json.dumps(profile)
    text = json.dumps(header).encode()
    text += b" " * (1 + -len(text) % 8)
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    net = random_net(seed=1)
    with attach(net, odd) as levels:
        levels.use(2)
    assert same(at(net), decode(path, 2))


def test_a_replaced_file_does_not_matter(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    expected = decode(path, 1)
    net = random_net(seed=1)
    levels = attach(net, path)
    pack(random_net(seed=2), path, force=True)
    levels.use(1)
    assert same(at(net), expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_replaced_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
) -> None:
    """Another file of its name does not matter, another content does."""
    path = pack(random_net(), tmp_path / "net.safetensors")
    expected = decode(path, 1)
    other = pack(random_net(seed=2), tmp_path / "other.safetensors")
    from internals import _torch_levels as module

    plain = module.packed_weights

    def replaced(file: elsa_format.File, *rest: object) -> object:
        if in_place:
            path.write_bytes(other.read_bytes())
            os.utime(path, ns=(0, 0))
        else:
            os.replace(other, path)
        return plain(file, *rest)

    monkeypatch.setattr(module, "packed_weights", replaced)
    net = random_net(seed=1)
    if in_place:
        with pytest.raises(InputChanged):
            attach(net, path)
    else:
        attach(net, path).use(1)
        assert same(at(net), expected)


def test_from_an_open_stream(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1)
    with path.open("rb") as stream:
        attach(net, stream).use(1)
    assert same(at(net), decode(path, 1))


def test_damage_is_noticed(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 64
    path.write_bytes(raw)
    with pytest.raises(ChecksumMismatch):
        attach(random_net(), path)


def test_a_delivery_file_and_the_index_of_a_variant(tmp_path: Path) -> None:
    net = torch.nn.Linear(40, 40)
    weights = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    (tmp_path / "m").mkdir()
    index = tmp_path / "m" / "model.safetensors.index.fp16.json"
    elsa_format.pack(weights, index, sparsities=[90, 50])
    elsa_format.ship(tmp_path / "m", tmp_path / "ship")
    for source in (index, tmp_path / "m", tmp_path / "ship"):
        levels = attach(net, source, level=2)
        levels.use(1)
        with elsa_format.open(index) as file:
            assert net.weight.detach().numpy().tobytes() == file.tensor("weight", 1).tobytes()


def test_parameters_that_were_replaced(tmp_path: Path) -> None:
    """A switch is for the tensors that the module has now, or an error."""
    path = pack(random_net(), tmp_path / "net.safetensors")
    net = random_net(seed=1)
    levels = attach(net, path, 1)
    net.conv.weight = nn.Parameter(torch.zeros_like(net.conv.weight))
    levels.use(2)
    assert same(at(net), decode(path, 2))
    net.conv.weight = nn.Parameter(torch.zeros(1))
    before = at(net)
    with pytest.raises(TensorMismatch, match="weight' is not as it was"):
        levels.use(1)
    assert (at(net), levels.level) == (before, 2)
    net.to_empty(device="meta")
    with pytest.raises(TensorMismatch, match="is not as it was"):
        levels.use(1)


def test_a_switch_after_close_is_an_error(tmp_path: Path) -> None:
    path = pack(random_net(), tmp_path / "net.safetensors")
    levels = attach(random_net(), path, 1)
    levels.close()
    with pytest.raises(ValueError, match="is closed"):
        levels.use(2)
    assert levels.level == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_counts_are_compared(dtype: torch.dtype, tmp_path: Path) -> None:
    """Wherever a level is written to: the module's own memory, or memory that is cast from."""
    path = pack(random_net(), tmp_path / "net.safetensors")
    miscount(path, 1, "conv.weight", "größe.weight")
    net = random_net(dtype, seed=1)
    with pytest.raises(CountMismatch, match=r"weight': level 1 keeps .* expected"):
        attach(net, path, 1)
    levels = attach(net, path, 2)
    before = at(net)
    with pytest.raises(CountMismatch, match="level 1 keeps"):
        levels.use(1)
    assert (levels.level, at(net)) == (2, before)
    levels.use("dense")
    levels.use(2)
    assert at(net) == before
