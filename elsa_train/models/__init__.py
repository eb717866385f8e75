"""Networks of the paper, small ones for digits and text (flax linen, called with `train=`)."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn

from elsa_train._errors import BadRecipe
from elsa_train.models.digits import DigitsNet
from elsa_train.models.gpt import GPT
from elsa_train.models.resnet import ResNet50
from elsa_train.models.speedyresnet import SpeedyResNet
from elsa_train.models.wideresnet import WideResNet

__all__ = ["GPT", "DigitsNet", "ResNet50", "SpeedyResNet", "WideResNet", "build"]

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits": DigitsNet,
    "gpt": GPT,
    "resnet50": ResNet50,
    "speedyresnet": SpeedyResNet,
    "wideresnet": WideResNet,
}


def build(name: str, *, num_classes: int, width: int = 0, **settings: Any) -> nn.Module:
    """Make a bundled model; width 0 is the paper's."""
    if name not in _MODELS:
        raise BadRecipe(f"model {name!r}: found none such, expected one of {sorted(_MODELS)}")
    sized = {"width": width} if width else {}
    return _MODELS[name](num_classes=num_classes, **sized, **settings)
