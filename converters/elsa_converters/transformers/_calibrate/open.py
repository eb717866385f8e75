"""A model directory and samples, ready to be nested by calibration."""

import os
from pathlib import Path

from elsa_converters.calibrate import Nested
from elsa_converters.torch._calibrate.open import nested
from elsa_converters.transformers._calibrate.load import load
from elsa_converters.transformers._calibrate.samples import SamplesLike, read_batches
from elsa_format.plugins import CalibrationOptions, open_checkpoint


def calibration(
    source: str | os.PathLike[str], samples: SamplesLike, options: CalibrationOptions
) -> Nested:
    """A model directory that `elsa_format.pack` can nest by calibration.

    The weights are mapped, not read whole; the model runs in the dtype that it is stored in, block
    by block. Only tensors that it has vary by level, so that `from_pretrained` loads each of them.

    >>> from fractions import Fraction
    >>> options = CalibrationOptions(levels=[Fraction(1, 2)])
    >>> calibration("no-model", ["A text."], options)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: ...

    Args:
        source: The directory, as `save_pretrained` writes it, or timm's `save_for_hf`.
        samples: Text: a .txt file, a .jsonl file whose lines have the key `text`, a directory of
            such, or strings. Arguments of the model, samples along the first axis: an .npz file
            with an array for each, an .npy file for the first, or batches as mappings.
        options: What is asked.

    Raises:
        InvalidData: The samples do not fit the model, or it cannot be run.
    """
    folder = Path(source)
    checkpoint = open_checkpoint(source)
    try:
        left_out = options.left_out(checkpoint.tensors, folder)
        loaded = load(folder, checkpoint)
        batches = read_batches(samples, folder, loaded.model, options)
        return nested(
            checkpoint,
            loaded.model,
            batches,
            options,
            {**loaded.left, **left_out},
            named=loaded.named,
            classes=loaded.classes,
            notes=loaded.notes,
        )
    except BaseException:
        checkpoint.close()
        raise
