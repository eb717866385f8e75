"""Arrays of numpy's files, whatever is in them."""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elsa_converters._errors import InvalidData

Array = NDArray[Any]


def read_numpy(path: str | os.PathLike[str]) -> Array | dict[str, Array]:
    """The array of an .npy file, or those of an .npz file by name; what is neither is refused."""
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found as archive:
            return dict(archive)
    except MemoryError:
        raise
    except Exception as error:  # whatever numpy, zipfile and zlib raise for what is damaged
        if isinstance(error, OSError) and error.filename is not None:
            raise
        reason = "" if "pickle" in str(error) else f": {' '.join(str(error).split())}"
        where = os.fspath(path)
        raise InvalidData(
            f"{where}: is not a numpy archive (.npz) or array (.npy){reason}"
        ) from None
