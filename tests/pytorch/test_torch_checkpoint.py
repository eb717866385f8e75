"""What PyTorch has saved, packed."""

import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from decoder import content, decode
from elsa_converters.torch import TorchCheckpoint, state_dict
from internals import import_line
from safetensors.torch import load_file, load_model, save_file
from test_load_level import random_net
from torch import nn

import elsa_format
from elsa_format import ElsaError, FormatError, InvalidCheckpoint
from elsa_format.cli import install_command


def packed(source: object, path: Path) -> bytes:
    elsa_format.pack(source, path, sparsities=[90, 50], force=True)  # type: ignore[arg-type]
    return path.read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_state_dict_gives_what_safetensors_gives(dtype: torch.dtype, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3, dtype=dtype), nn.BatchNorm2d(8, dtype=dtype))
    save_file(net.state_dict(), tmp_path / "dense.safetensors", metadata={"format": "pt"})
    expected = packed(tmp_path / "dense.safetensors", tmp_path / "one.safetensors")
    # Other orders, as safetensors sorts; the layout in the file may differ, the tensors not.
    packed(net.state_dict(), tmp_path / "two.safetensors")
    packed(dict(net.named_parameters()) | dict(net.named_buffers()), tmp_path / "three.safetensors")
    for suffix in (".pt", ".pth", ".bin", ".ckpt"):
        torch.save(net.state_dict(), tmp_path / f"dense{suffix}")
        packed(tmp_path / f"dense{suffix}", tmp_path / f"from{suffix}.safetensors")
    assert expected
    wanted = decode(tmp_path / "one.safetensors", 1)
    for path in [*tmp_path.glob("from*.safetensors"), *tmp_path.glob("t*.safetensors")]:
        assert decode(path, 1) == wanted


def test_memory_in_any_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = torch.randn(64, 48)
    tensors = {
        "transposed": base.t(),
        "slice": base[::2, 1:-1],
        "expanded": torch.randn(1, 20).expand(16, 20),
        "flipped": base.flip(0),
        "learns": base.clone().requires_grad_(),
        "last": torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last),
    }
    elsa_format.pack(tensors, tmp_path / "a.safetensors", sparsities=[50])
    plain = {name: t.detach().contiguous().numpy() for name, t in tensors.items()}
    elsa_format.pack(plain, tmp_path / "b.safetensors", sparsities=[50])
    assert decode(tmp_path / "a.safetensors", 1) == decode(tmp_path / "b.safetensors", 1)


def test_views_that_are_not_yet_computed(tmp_path: Path) -> None:
    z = torch.randn(4, 4, dtype=torch.complex64)
    tensors = {"w": torch.randn(8, 8), "conj": z.conj(), "imag": z.conj().imag}
    elsa_format.pack(tensors, tmp_path / "a.safetensors", sparsities=[50], exclude="imag")
    loaded = state_dict(tmp_path / "a.safetensors")
    assert content(loaded["conj"]) == content(z.conj().resolve_conj())
    assert content(loaded["imag"]) == content(z.conj().imag.resolve_neg().clone())


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    net = random_net()
    path = tmp_path / "net.safetensors"
    elsa_format.pack(net.state_dict(), path, sparsities=[50])
    assert "head.weight" not in load_file(path)
    other = random_net(seed=1)
    load_model(other, path)  # safetensors' own
    assert content(other.head.weight) == decode(path, None)["embed.weight"]


def test_a_training_checkpoint(tmp_path: Path) -> None:
    net = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(2, 16)).sum().backward()
    optimizer.step()
    for key in ("state_dict", "model_state_dict", "model"):
        saved = {"epoch": 3, key: net.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(saved, tmp_path / "run.ckpt")
        assert set(TorchCheckpoint(tmp_path / "run.ckpt").tensors) == {"weight", "bias"}


def test_files_of_old_versions(tmp_path: Path) -> None:
    net = nn.Linear(16, 16)
    torch.save(net.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    packed(tmp_path / "old.pt", tmp_path / "net.safetensors")
    assert decode(tmp_path / "net.safetensors", None)["bias"] == content(net.bias)


class Planted:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch planted",)


def hostile(folder: Path) -> dict[str, Path]:
    net = nn.Linear(64, 64)
    whole = folder / "whole.pt"
    torch.save(net.state_dict(), whole)
    raw = whole.read_bytes()
    files = {name: folder / f"{name}.pt" for name in ("model", "planted", "raw", "cut", "zip")}
    files |= {name: folder / f"{name}.pt" for name in ("list", "number", "empty", "keys", "script")}
    files |= {name: folder / f"{name}.bin" for name in ("nothing", "text")}
    torch.save(net, files["model"])
    torch.save({"a": Planted()}, files["planted"])
    files["raw"].write_bytes(pickle.dumps({"a": Planted()}))
    files["cut"].write_bytes(raw[: len(raw) // 2])
    files["zip"].write_bytes(raw[:40] + bytes(100))
    torch.save([torch.ones(2, 2)], files["list"])
    torch.save({"a": torch.ones(2, 2), "epoch": 3}, files["number"])
    torch.save({}, files["empty"])
    torch.save({3: torch.ones(2, 2)}, files["keys"])
    torch.jit.save(torch.jit.trace(net, torch.ones(1, 64)), files["script"])
    files["nothing"].write_bytes(b"")
    files["text"].write_text("not a checkpoint\n" * 100)
    return files


@pytest.mark.filterwarnings("ignore")
def test_hostile_files_get_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in hostile(tmp_path).items():
        with pytest.raises(FormatError) as caught:
            elsa_format.pack(path, tmp_path / "out.safetensors", sparsities=[50])
        assert "\n" not in str(caught.value), name
        assert str(path) in str(caught.value)
    assert "weights_only=True" in str(_error(tmp_path / "model.pt"))
    assert "'epoch' is of type int" in str(_error(tmp_path / "number.pt"))
    assert not (tmp_path / "planted").exists()
    assert not (tmp_path / "out.safetensors").exists()
    with pytest.raises(FileNotFoundError):
        TorchCheckpoint(tmp_path / "none.pt")


def test_what_is_refused_does_not_hang_on_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's words for a pickle that it refuses change with its versions."""

    def refuse(*_: object, **__: object) -> None:
        raise pickle.UnpicklingError("in other words")

    torch.save(nn.Linear(2, 2), tmp_path / "model.pt")
    expected = str(_error(tmp_path / "model.pt"))
    monkeypatch.setattr(torch, "load", refuse)
    assert str(_error(tmp_path / "model.pt")) == expected
    assert expected.endswith("save model.state_dict()")


def _error(path: Path) -> ElsaError:
    with pytest.raises(ElsaError) as caught:
        TorchCheckpoint(path)
    return caught.value


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4, 4, device="meta"),
        lambda: torch.eye(4).to_sparse(),
        lambda: torch.ones(4, 4, dtype=torch.complex128),
        lambda: torch.quantize_per_tensor(torch.ones(4, 4), 0.1, 0, torch.qint8),
    ],
    ids=["meta", "sparse", "complex128", "quantized"],
)
def test_tensors_that_cannot_be_stored(make: Callable[[], torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(InvalidCheckpoint, match="tensor 'bad'"):
        elsa_format.pack({"bad": make()}, tmp_path / "out.safetensors", sparsities=[50])


def test_names_and_values_that_cannot_be_stored(tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    with pytest.raises(InvalidCheckpoint, match="reserved"):
        elsa_format.pack({"__elsa__.1.a": torch.ones(4, 4)}, out, sparsities=[50])
    mixed = OrderedDict(a=torch.ones(4, 4), b="text")
    with pytest.raises(InvalidCheckpoint, match="'b' is of type str"):
        elsa_format.pack(mixed, out, sparsities=[50])  # type: ignore[arg-type]
    bad = torch.ones(4, 4)
    bad[1, 1] = torch.nan
    with pytest.raises(elsa_format.NonFinite, match="'a': weight 5"):
        elsa_format.pack({"a": bad}, out, sparsities=[50])
    assert not out.exists()


def test_the_command_says_what_to_install(tmp_path: Path) -> None:
    torch.save(nn.Linear(8, 8).state_dict(), tmp_path / "net.pt")
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"{import_line('_start')}\n"
        f"sys.argv = ['elsa-pack', {str(tmp_path / 'net.pt')!r}, '--sparsities', '50', '-o', 'x']\n"
        "_start.pack()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"needs torch; run: {install_command('torch')}" in done.stderr
