"""Name the files that are given in place of safetensors: what one is, and what to do about it."""

import re
from codecs import getincrementaldecoder

SNIFFED = 64
"""Bytes that tell one kind from another."""

_KINDS = [
    (rb"PK\x03\x04.{26}[^/]*/data\.pkl", "a PyTorch checkpoint", "{torch}"),
    (rb"PK\x03\x04.{26}.*\.npy", "a numpy archive", "elsa-pack reads it if its name ends in .npz"),
    (rb"PK\x03\x04", "a zip archive", "if torch.save wrote it, {torch}"),
    (rb"\x80[\x02-\x05]", "a Python pickle", "if torch.save wrote it, {torch}"),
    (rb"\x89HDF\r\n", "an HDF5 file", "save the weights as safetensors or .npz"),
    (rb"GGUF", "a GGUF file", "pack the checkpoint it was made from"),
    (rb"\x93NUMPY", "a single numpy array", "save named arrays with numpy.savez"),
    (rb"....TFL3", "a TensorFlow Lite model", "pack the checkpoint it was made from"),
    (
        rb"\x08[\x01-\x1f][\x12\x1a\x22\x28\x32\x3a\x42]",
        "an ONNX model",
        "elsa-pack reads it if its name ends in .onnx",
    ),
    (rb"\x1f\x8b", "compressed with gzip", "decompress it"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd", "decompress it"),
    (rb"version https://git-lfs", "a git-lfs pointer, not the file itself", "run git lfs pull"),
    (rb"\s*(?i:<!doctype|<html)", "a web page", "take the link of the file itself"),
    (rb"\s*<\?xml", "an XML document", "if a server sent it, it holds the server's error"),
    (rb"\s*[{\[]", "JSON", "if it is a shard index, its name must end in .index.json"),
]
_TORCH = "elsa-pack reads it if its name ends in .pt or .bin"


def other_format(first: bytes, expected: str = "safetensors") -> str | None:
    """What a file is that starts with these bytes, if it is a known kind other than expected.

    Args:
        first: The first bytes of the file, at most `SNIFFED`.
        expected: What the file should be, as it is called here: "safetensors", "an ONNX model".

    >>> other_format(b"GGUF" + bytes(60))
    'is a GGUF file; pack the checkpoint it was made from'
    """
    for pattern, kind, advice in _KINDS:
        if re.match(pattern, first, re.DOTALL):
            return None if kind == expected else f"is {kind}; {advice.format(torch=_TORCH)}"
    if _is_text(first):
        return f"is a text file, not {expected}; name a file of weights"
    return None


def _is_text(first: bytes) -> bool:
    """Whether bytes are the beginning of a text, of which the last character may be cut."""
    try:
        text = getincrementaldecoder("utf-8")().decode(first)
    except UnicodeDecodeError:
        return False
    return bool(text) and all(c.isprintable() or c in "\t\n\f\r" for c in text)
