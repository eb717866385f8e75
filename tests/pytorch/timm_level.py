"""Load a level into a model of timm; run by test_timm.py, in a process of its own.

timm imports torchvision, whose wheels need CUDA's PyTorch. What it takes from there are image
transforms and a layer, none of which is used here: empty classes do.
"""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


class Members(type):
    """Of a class: has every member, as an enumeration would."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandIn(ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Members(name, (), {})


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Finder())  # last: a torchvision that is there is used

import numpy  # noqa: E402
import timm  # noqa: E402
import torch  # noqa: E402
from decoder import content, decode  # noqa: E402
from elsa_converters.torch import load_level  # noqa: E402

import elsa_format  # noqa: E402

folder = Path(sys.argv[1])
torch.manual_seed(0)
for name in ("resnet10t", "vit_tiny_patch16_224"):
    model = timm.create_model(name, num_classes=10)
    path = folder / f"{name}.safetensors"
    elsa_format.pack(model.state_dict(), path, sparsities=[80, 50], scope="uniform", digests=False)
    other = timm.create_model(name, num_classes=10)
    load_level(other, path, level=1)
    assert {n: content(t) for n, t in other.state_dict().items()} == decode(path, 1)
    print(name)

from timm.models import save_for_hf  # noqa: E402

model = timm.create_model("test_resnet", num_classes=10).eval()
save_for_hf(model, folder / "dense", safe_serialization=True)
pictures = torch.randn(32, 3, 48, 48)
numpy.save(folder / "pictures.npy", pictures.numpy())
report = elsa_format.pack(
    folder / "dense", folder / "packed", sparsities=[75, 50], calibrate=folder / "pictures.npy"
)
with torch.no_grad():
    held = pictures.unflatten(0, (16, 2))[7::8].flatten(0, 1)
    expected = model(held)
    load_level(model, folder / "packed", level=1)
    found = model(held)
error = float((found - expected).norm() / expected.norm())
assert abs(report.profile.levels[0].metrics["relative_error"] / error - 1) < 1e-4
assert report.profile.levels[0].metrics["agreement"] >= 0
print("test_resnet")
