"""`from_pretrained` at a level, through the plug-ins that transformers has for quantization."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from weakref import WeakMethod

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

import elsa_format
from elsa_converters.sparse._choice import Fast, check_fast
from elsa_converters.transformers._fetched import EXTRACT, load_fetched_directories
from elsa_converters.transformers._levels import LEVELS, ModelLevels, Network, places_of
from elsa_format import InvalidCheckpoint, InvalidOption, TensorMismatch
from elsa_format.plugins import LevelChoice, LevelLike, LevelNumber


@register_quantization_config("elsa")
class ElsaConfig(QuantizationConfigMixin):
    """Which level `from_pretrained` is to load: a number, a name, or "dense".

    Or the sparsest level with metrics of at least `min`, such as `{"accuracy": 0.9}`, and at most
    `max`. `verify=False` does without the comparison with the files' checksums. `fast` and
    `keep_dense` are those of `elsa_converters.torch.attach`: which layers skip their zeros, and
    whether they keep dense weights as well.

    >>> ElsaConfig(level=2).level
    2
    """

    def __init__(
        self,
        level: LevelLike | None = None,
        verify: bool = True,
        quant_method: str = "elsa",  # as transformers reads it from config.json
        min: Mapping[str, float] | None = None,
        max: Mapping[str, float] | None = None,
        fast: Fast = False,
        keep_dense: bool = True,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise InvalidOption(
                f"ElsaConfig has no option {sorted(unknown)[0]!r}; it has level, min, "
                "max, verify, fast and keep_dense"
            )
        self.quant_method = quant_method
        self.level = "dense" if level is None and not (min or max) else level
        self.verify, self.min, self.max = verify, min, max
        self.fast, self.keep_dense = fast, keep_dense
        check_fast(fast)
        LevelChoice.of(vars(self))


@register_quantizer("elsa")
class ElsaQuantizer(HfQuantizer):
    """What transformers calls before and after it loads the weights.

    It loads the dense network as ever, by its own names. Then the level is written over it: from
    the files where a tensor was only renamed, in place where tensors were merged.
    """

    network: Network
    extracted: TemporaryDirectory[str] | None = None
    """Where the level of a delivery file is until it is loaded."""
    level: LevelNumber
    wanted: dict[str, torch.dtype]
    shapes: dict[str, torch.Size]

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Called right before transformers looks for files."""
        EXTRACT.set(WeakMethod(self._extract))

    def _extract(self, source: Path) -> str:
        """Extract the level of a delivery file to a file that transformers reads."""
        config = self.quantization_config
        self.network = Network([str(source)], delivered=True)
        self.extracted = TemporaryDirectory(prefix="elsa-", ignore_cleanup_errors=True)
        level = Path(self.extracted.name, "model.safetensors")
        try:
            wanted = {"level": config.level, "min": config.min, "max": config.max}
            elsa_format.extract(source, level, verify=config.verify, **wanted)
        except BaseException:
            self.extracted.cleanup()
            raise
        return str(level)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **_: Any
    ) -> PreTrainedModel:
        files = checkpoint_files or []
        if not files or not all(str(file).endswith(".safetensors") for file in files):
            raise InvalidCheckpoint(f"{model.name_or_path}: no .safetensors file to load")
        config = self.quantization_config
        if self.extracted is None:
            self.network = Network(files)
        self.level = self.network.choose(LevelChoice.of(vars(config)))
        if config.verify:
            self.network.verify()
        # Variants of per-level tensors are nothing to warn of.
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, r"^__elsa__\."}
        # Merged weights are masked after loading, so they must not be cast before.
        self.wanted = {}
        own = model.state_dict(keep_vars=True)
        self.shapes = {name: tensor.shape for name, tensor in own.items()}
        places = places_of(model, self.network, get_model_conversion_mapping(model))
        for place in ModelLevels(model, self.network, places).converted:
            for held in place.held:
                self.wanted[held] = own[held].dtype
                own[held].data = own[held].data.to(self.network.dtype(place.stored))
        return model

    def _process_model_after_weight_loading(
        self, model: PreTrainedModel, **_: Any
    ) -> PreTrainedModel:
        self._refuse_other_shapes(model)
        places = places_of(model, self.network, model._weight_conversions or [])
        config = self.quantization_config
        levels = ModelLevels(model, self.network, places)
        levels.fast, levels.keep_dense = config.fast, config.keep_dense
        levels.mask_converted(model, self.level, self.wanted)
        if self.extracted is None:
            levels.show(model, self.level, fresh=True)
        else:
            self.extracted.cleanup()
            self._refuse_offloaded(model)
            levels.make_fast(model)
        LEVELS[model] = levels
        self._leave(model)
        return model

    def _refuse_other_shapes(self, model: PreTrainedModel) -> None:
        """Compare shapes, which transformers leaves to the plug-in, and takes those of the file."""
        for name, tensor in model.state_dict().items():
            if tensor.shape != self.shapes.get(name, tensor.shape):
                raise TensorMismatch(
                    f"{self.network.where}: {name!r} has shape {list(tensor.shape)}, by the config "
                    f"it is {list(self.shapes[name])}; for another head, extract the level, and "
                    "load that with ignore_mismatched_sizes=True"
                )

    def _refuse_offloaded(self, model: PreTrainedModel) -> None:
        """Refuse weights that would be read from the extracted level later."""
        for name, tensor in model.state_dict().items():
            if tensor.is_meta:
                raise InvalidOption(
                    f"{self.network.where}: {name!r} is offloaded, which a delivery file does not "
                    f"support; run: elsa-extract {Path(self.network.where).parent} "
                    f"--level {self.level} -o OUT"
                )

    def _leave(self, model: PreTrainedModel) -> None:
        """What is left is an ordinary model: it trains, casts and saves like one."""
        self.remove_quantization_config(model)
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                vars(module.config).pop("_is_quantized", None)

    def is_serializable(self, **_: Any) -> bool:
        """Whether `save_pretrained` may save the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether the model may be trained."""
        return True


load_fetched_directories()
