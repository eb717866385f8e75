"""Levels in Hugging Face transformers: `from_pretrained` at a level, and switch to another.

>>> from elsa_converters.transformers import ElsaConfig
>>> config = ElsaConfig(level=2)  # from_pretrained(directory, quantization_config=config)
"""

from elsa_converters.transformers._calibrate.open import calibration
from elsa_converters.transformers._levels import use_level
from elsa_converters.transformers._quantizer import ElsaConfig
from elsa_converters.transformers._text import evaluate_text

__all__ = ["ElsaConfig", "calibration", "evaluate_text", "use_level"]
