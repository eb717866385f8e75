"""Layers that skip the zeros of their weights, as users of PyTorch use them."""

import copy
import io
import os
import pickle
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from elsa_converters import torch as elsa_torch
from elsa_converters.sparse import find_library
from internals import _fast_layers, _fast_packed, _fast_sparsify
from torch import nn
from torch.nn.utils import prune

import elsa_format

pytestmark = pytest.mark.skipif(
    find_library() is None and not os.environ.get("CI"), reason="the sparse layers were not built"
)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def warned():
    """Each test sees what is said once."""
    _fast_layers._warned.clear()


def sparse(*shape, zeros=0.8, dtype=torch.float32):
    """Random weights with zeros."""
    return (torch.randn(shape) * (torch.rand(shape) >= zeros)).to(dtype)


def close(found, expected):
    """Equal within the stated tolerance, of the largest output."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    if expected.numel():
        error = (found.float() - expected.float()).abs().max()
        assert error <= TOLERANCE[expected.dtype] * max(1.0, expected.float().abs().max())


def network(*, zeros=0.9, dtype=torch.float32):
    """A small network at a level."""
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(sparse(*layer.weight.shape, zeros=zeros))
    return model.to(dtype).eval()


@pytest.fixture
def fast():
    """A network, and the same with fast layers."""
    model = network()
    quick = copy.deepcopy(model)
    assert elsa_torch.sparsify(quick, fast=0.7) == ["0", "2"]
    return model, quick


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_linear_layers(dtype):
    """Shapes, views, batch dimensions, empty inputs, rows without weights, wide layers."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    for turn in range(40):
        outputs, inputs = (int(n) for n in rng.integers(1, 90, 2))
        if turn % 10 == 9:
            inputs = int(rng.integers(4097, 9000))
        layer = nn.Linear(inputs, outputs, bias=bool(turn % 3)).to(dtype)
        layer.weight.data = sparse(outputs, inputs, zeros=rng.uniform(0, 1.1), dtype=dtype)
        quick = copy.deepcopy(layer)
        assert elsa_torch.sparsify(quick, fast=0) == [""]
        batch = tuple(int(n) for n in rng.integers(0, 7, int(rng.integers(0, 4))))
        inputs_ = [torch.randn(*batch, inputs).to(dtype), torch.randn(70, inputs).to(dtype)]
        inputs_.append(torch.randn(inputs, 9).to(dtype).t())  # strides of a view
        inputs_.append(torch.randn(5, 2 * inputs).to(dtype)[:, ::2])
        with torch.inference_mode():
            for x in inputs_:
                close(quick(x), layer(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_convolutions(dtype):
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    for turn in range(30):
        sides = tuple(int(n) for n in rng.integers(1, 5, 2))
        pads = "same" if turn % 5 == 0 else tuple(int(n) for n in rng.integers(0, 3, 2))
        steps = 1 if pads == "same" else tuple(int(n) for n in rng.integers(1, 4, 2))
        channels, outputs = (int(n) for n in rng.integers(1, 20, 2))
        layer = nn.Conv2d(channels, outputs, sides, steps, pads, bias=bool(turn % 3)).to(dtype)
        layer.weight.data = sparse(*layer.weight.shape, dtype=dtype)
        quick = copy.deepcopy(layer)
        assert elsa_torch.sparsify(quick, fast=0) == [""]
        size = [int(n) for n in rng.integers(4, 20, 2)]
        x = torch.randn(int(rng.integers(0, 3)), channels, *size).to(dtype)
        with torch.inference_mode():
            close(quick(x), layer(x))
            close(quick(x.to(memory_format=torch.channels_last)), layer(x))


def test_wrong_inputs_are_refused_as_by_dense_layers(fast):
    _, quick = fast
    with torch.inference_mode():
        with pytest.raises((RuntimeError, ValueError), match=r"48|expected"):
            quick(torch.randn(2, 47))
        with pytest.raises(RuntimeError, match="dtype"):
            quick(torch.randn(2, 48, dtype=torch.float64))
        convolution = nn.Conv2d(2, 3, 5)
        elsa_torch.sparsify(convolution, fast=0)
        with pytest.raises((RuntimeError, ValueError), match="kernel"):
            convolution(torch.randn(1, 2, 3, 3))


def test_packed_tensors_are_checked_before_they_are_used():
    """A program from elsewhere may hold anything."""
    packed = _fast_packed.pack(sparse(8, 16))
    x = torch.randn(2, 16)

    def run(values=packed.values, columns=packed.columns, starts=packed.starts, inputs=16):
        return torch.ops.elsa.linear(x[:, :inputs], values, columns, starts, None, inputs)

    assert run().shape == (2, 8)
    bad = packed.columns.clone()
    bad[0] = 1000
    falling = packed.starts.clone()
    falling[0, 1] = -5
    for wrong in (
        {"columns": bad},
        {"columns": packed.columns[:-1]},
        {"columns": packed.columns.int()},
        {"starts": falling},
        {"starts": packed.starts[:, :-1]},
        {"values": packed.values.double()},
        {"values": packed.values[:-1]},
        {"inputs": 3},
    ):
        with pytest.raises((ValueError, TypeError), match="elsa: "):
            run(**wrong)


def test_memory_that_is_used_again_is_checked_again():
    """New weights may be where others were that have been prepared."""
    for _ in range(300):
        weight = sparse(16, 32, zeros=float(np.random.uniform(0.1, 1)))
        layer = nn.Linear(32, 16, bias=False)
        layer.weight.data = weight
        elsa_torch.sparsify(layer, fast=0)
        x = torch.randn(20, 32)
        with torch.inference_mode():
            close(layer(x), x @ weight.T)
    assert len(_fast_packed._LAYERS) < 300


def test_layers_that_do_not_gain_stay_dense(monkeypatch):
    model = network(zeros=0.1)
    assert elsa_torch.sparsify(model) == []
    model = network()
    monkeypatch.setattr(_fast_sparsify, "gains", lambda module, *_: module.bias is not None)
    assert elsa_torch.sparsify(model) == ["0"]
    assert elsa_torch.sparsify(model, fast=False) == []
    assert type(model[0]) is nn.Linear
    with pytest.raises(elsa_format.InvalidOption, match="fast='quick'"):
        elsa_torch.sparsify(model, fast="quick")


def test_timed_once(monkeypatch):
    timed = []
    monkeypatch.setattr(_fast_sparsify, "_gains", {})
    monkeypatch.setattr(_fast_sparsify, "_time", lambda *a: bool(timed.append(a)) or True)
    weight = sparse(64, 64)
    for _ in range(2):
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        for layer in layers:
            layer.weight.data = weight
        elsa_torch.sparsify(layers)
    assert len(timed) == 1


def test_timing_runs():
    """Whatever it finds."""
    elsa_torch.sparsify(network())
    elsa_torch.sparsify(nn.Sequential(nn.Conv2d(2, 2, 3)), fast=True)
    convolution = nn.Conv2d(8, 8, 3)
    convolution.weight.data = sparse(8, 8, 3, 3)
    elsa_torch.sparsify(convolution)


def test_gradients_are_dense_and_a_forgotten_no_grad_is_told_once(fast):
    model, quick = fast
    x = torch.randn(3, 48)
    with pytest.warns(RuntimeWarning, match="use torch.inference_mode"):
        quick(x).sum().backward()
    model(x).sum().backward()
    close(quick[0].weight.grad, model[0].weight.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick(x)
        quick.train()(x)
        with torch.no_grad():
            close(quick(x), model(x))
    packed = quick[0].packed()
    with pytest.raises(RuntimeError, match="no gradients"):
        torch.ops.elsa.linear(x.requires_grad_(), *packed, None, 48)


def test_weights_that_change_are_not_computed_from_old_ones(fast):
    model, quick = fast
    x = torch.randn(2, 48)
    for each in (model, quick):
        with torch.no_grad():
            each[0].weight.mul_(2)
    with torch.inference_mode():
        with pytest.warns(RuntimeWarning, match="changed since they were packed"):
            close(quick(x), model(x))
        assert type(quick[0]) is nn.Linear
        assert elsa_torch.sparsify(quick, fast=0.7) == ["0", "2"]
        close(quick(x), model(x))


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = network()
        x = torch.randn(2, 48)
        expected = model(x)
        assert elsa_torch.sparsify(model, fast=0.7)
        close(model(x), expected)


@pytest.mark.parametrize("keep_dense", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts(dtype, keep_dense):
    """To half and double, layers are dense from then on."""
    model, quick = network(), None
    quick = copy.deepcopy(model)
    elsa_torch.sparsify(quick, fast=0.7, keep_dense=keep_dense)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model, quick = model.to(dtype), quick.to("cpu").to(dtype)
    assert len(said) == (dtype != torch.bfloat16)
    assert isinstance(quick[0], _fast_layers.FastLayer) == (dtype == torch.bfloat16)
    x = torch.randn(2, 48, dtype=dtype)
    with torch.inference_mode():
        expected = model(x)
        torch.testing.assert_close(quick(x), expected, rtol=0.02, atol=0.02)


def test_another_device_is_dense(fast):
    """As CUDA and MPS would be; meta is the one that every machine has."""
    _, quick = fast
    with pytest.warns(RuntimeWarning, match="on meta they are dense"):
        quick.to("meta")
    assert type(quick[0]) is nn.Linear
    assert quick(torch.empty(2, 48, device="meta")).shape == (2, 32)


def test_autocast(fast):
    model, quick = fast
    x = torch.randn(4, 48)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        close(quick(x), model(x))
        assert isinstance(quick[0], _fast_layers.FastLayer)


@pytest.mark.parametrize("keep_dense", [True, False])
def test_state_dict_is_that_of_the_level(keep_dense):
    model, quick = network(), None
    quick = copy.deepcopy(model)
    elsa_torch.sparsify(quick, fast=0.7, keep_dense=keep_dense)
    assert quick[0].weight.is_meta != keep_dense
    found, expected = quick.state_dict(), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    other = network(zeros=0.5)
    quick.load_state_dict(other.state_dict())
    x = torch.randn(2, 48)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(quick(x), other(x))


@pytest.mark.parametrize("keep_dense", [True, False])
def test_copies(keep_dense):
    """Deep copies and pickles are fast, too, and go on without the original."""
    model = network()
    x = torch.randn(2, 48)
    with torch.inference_mode():
        expected = model(x)
        elsa_torch.sparsify(model, fast=0.7, keep_dense=keep_dense)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies.append(torch.load(saved, weights_only=False))
        del model
        for each in copies:
            assert isinstance(each[0], _fast_layers.FastLayer)
            close(each(x), expected)
            assert isinstance(each[0], _fast_layers.FastLayer)


def test_a_copy_of_changed_weights_is_not_taken_for_packed(fast):
    model, quick = fast
    for each in (model, quick):
        with torch.no_grad():
            each[0].weight.mul_(2)
    x = torch.randn(2, 48)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        close(copy.deepcopy(quick)(x), model(x))


def test_without_dense_weights_nothing_is_trained():
    model = network()
    elsa_torch.sparsify(model, fast=0.7, keep_dense=False)
    x = torch.randn(2, 48)
    assert not model(x).requires_grad
    with pytest.raises(RuntimeError, match="cannot be trained"):
        model.train()(x)
    with pytest.raises(RuntimeError, match="no gradients"):
        model.eval()(x.requires_grad_())


def test_tied_weights_stay_in_memory():
    embedding, head = nn.Embedding(50, 16), nn.Linear(16, 50, bias=False)
    embedding.weight.data = sparse(50, 16)
    head.weight = embedding.weight
    model = nn.ModuleList([embedding, head])
    assert elsa_torch.sparsify(model, fast=0.5, keep_dense=False) == ["1"]
    assert head.weight is embedding.weight
    with torch.inference_mode():
        close(head(embedding.weight), embedding.weight @ embedding.weight.T)


def test_computed_weights_stay_dense():
    layer = nn.Linear(16, 16)
    prune.l1_unstructured(layer, "weight", 0.9)
    assert elsa_torch.sparsify(layer, fast=0.5) == []


def test_export(fast):
    """The program has the packed tensors, so that it can be saved."""
    model, quick = fast
    x = torch.randn(3, 48)
    with torch.inference_mode(False), torch.no_grad():
        shapes = ({0: torch.export.Dim("rows", min=2)},)
        program = torch.export.export(quick, (x,), dynamic_shapes=shapes)
        assert "elsa.linear" in program.graph_module.code
        saved = io.BytesIO()
        torch.export.save(program, saved)
        saved.seek(0)
        loaded = torch.export.load(saved).module()
        for rows in (3, 40):
            x = torch.randn(rows, 48)
            close(loaded(x), model(x))


def test_compiled_code_sees_a_switch(tmp_path):
    """And other sizes of what is packed."""
    file = tmp_path / "net.safetensors"
    model = network(zeros=0)
    elsa_format.pack(model.state_dict(), file, sparsities=[95, 80])
    dense = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 48)
    with elsa_torch.attach(compiled, file, 1, fast=0.7) as levels, torch.inference_mode():
        for level in (1, 2, "dense", 1):
            levels.use(level)
            elsa_torch.load_level(dense, file, level)
            close(compiled(x), dense(x))
        assert isinstance(model[0], _fast_layers.FastLayer)


def test_a_switch_of_weights_made_in_inference_mode(tmp_path):
    """They have no version that could tell of it."""
    file = tmp_path / "net.safetensors"
    elsa_format.pack(network(zeros=0).state_dict(), file, sparsities=[95, 80])
    x = torch.randn(4, 48)
    with torch.inference_mode():
        model, dense = network(), network()
        with elsa_torch.attach(model, file, 1, fast=0.7) as levels:
            for level in (2, 1, "dense"):
                levels.use(level)
                elsa_torch.load_level(dense, file, level)
                close(model(x), dense(x))


@pytest.mark.parametrize("keep_dense", [True, False])
@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("kind", ["file", "delivery"])
def test_attach_and_switch(tmp_path, keep_dense, meta, kind):
    file = tmp_path / "net.safetensors"
    dense = network(zeros=0)
    elsa_format.pack(dense.state_dict(), file, sparsities=[95, 80])
    if kind == "delivery":
        elsa_format.ship(file, tmp_path / "net.ship.safetensors")
        file = tmp_path / "net.ship.safetensors"
    model = copy.deepcopy(dense).to("meta" if meta else "cpu")
    x = torch.randn(4, 48)
    with (
        elsa_torch.attach(model, file, 1, fast=0.7, keep_dense=keep_dense) as levels,
        torch.inference_mode(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        for level in (1, 2, "dense", 2, 1):
            levels.use(level)
            fast = level != "dense"
            assert isinstance(model[0], _fast_layers.FastLayer) == fast
            assert model[0].weight.is_meta == (fast and not keep_dense)
            elsa_torch.load_level(dense, file, level)
            close(model(x), dense(x))
        levels.use(2, fast=False)
        assert type(model[0]) is nn.Linear
        elsa_torch.load_level(dense, file, 2)
        close(model(x), dense(x))


def test_a_switch_packs_only_what_changes(tmp_path):
    file = tmp_path / "net.safetensors"
    model = network(zeros=0)
    counters = {"0.weight": np.ones((64, 48), int), "2.weight": np.ones((32, 64), int)}
    counters["0.weight"][:, 5:] = 0
    counters["2.weight"][:, 10:] = 2
    counters["2.weight"][:, 30:] = 0
    arrays = elsa_torch.arrays(model.state_dict())
    elsa_format.pack(arrays, file, counters=counters)
    with elsa_torch.attach(model, file, 1, fast=0.3) as levels:
        before = [layer.elsa_values for layer in (model[0], model[2])]
        levels.use(2)
        assert model[0].elsa_values is before[0]
        assert model[2].elsa_values is not before[1]


def test_threads_and_layers_at_the_same_time(fast):
    model, quick = fast
    x = torch.randn(64, 48)
    torch.set_num_threads(2)
    wrong = []

    def run():
        with torch.inference_mode():
            for _ in range(50):
                if not torch.allclose(quick(x), expected, atol=1e-4):
                    wrong.append(1)

    try:
        with torch.inference_mode():
            expected = model(x)
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(1)
    assert not wrong


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_fork():
    """A child has no threads of its parent's, and makes its own."""
    layer = nn.Linear(2048, 2048)
    layer.weight.data = sparse(2048, 2048)
    elsa_torch.sparsify(layer, fast=0.7)
    x = torch.randn(1, 2048)
    layers = (layer.packed(), None, 2048)
    torch.set_num_threads(2)
    try:
        expected = torch.ops.elsa.linear(x, *layers[0], *layers[1:])
        child = os.fork()
        if not child:
            found = torch.ops.elsa.linear(x, *layers[0], *layers[1:])
            os._exit(int(not np.allclose(found.numpy(), expected.numpy(), atol=1e-4)))
        assert os.waitpid(child, 0)[1] == 0
    finally:
        torch.set_num_threads(1)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(_fast_sparsify, "find_library", lambda: None)
    model = network()
    with pytest.warns(RuntimeWarning, match="for want of a C compiler; all layers are dense"):
        assert elsa_torch.sparsify(model) == []
