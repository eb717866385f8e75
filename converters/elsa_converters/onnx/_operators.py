"""The sparse operators for any ONNX Runtime."""

from elsa_converters._errors import MissingOperators
from elsa_converters.onnx_sparse import find_library


def sparse_ops_library() -> str:
    """Path of the library for `SessionOptions.register_custom_ops_library`, in any language.

    >>> import onnxruntime
    >>> options = onnxruntime.SessionOptions()
    >>> options.register_custom_ops_library(sparse_ops_library())
    """
    path = find_library()
    if path is None:
        raise MissingOperators("models for them still run, densely")
    return str(path)
