"""Write the directory that a web page loads: the graph, one delivery file, and what goes with them.

In the graph each tensor is an external file of its own, which nobody has: who runs it gives the
tensors of a level, as transformers.js and ONNX Runtime Web let one.
"""

import json
import os
import urllib.parse
from pathlib import Path
from typing import Any

from elsa_converters._errors import InvalidOnnx
from elsa_converters.onnx._level.bind import Binding
from elsa_converters.onnx._level.read import Template, open_level
from elsa_converters.onnx._model.tensors import header_of, point_to
from elsa_format import ship
from elsa_format.plugins import Progress, no_progress, weights_file

GRAPH = "onnx/model.onnx"
"""Where transformers.js looks for the graph of a network in float32."""
CONFIG = "config.json"
_SETTINGS = "transformers.js_config"


def export_web(
    source: str | os.PathLike[str],
    template: Template,
    target: str | os.PathLike[str],
    *,
    max_bytes: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> None:
    """Write a directory that `elsa-format/transformers` and `elsa-format/run` load.

    It has the graph, the delivery file with all levels, config.json, and the side files of a model
    directory, tokenizers say. Any web server that understands ranges serves it; `fetch` reads it.

    Args:
        source: The ELSA file, a shard index or a model directory.
        template: The graph: a template, or any ONNX model with the same weights.
        target: The directory.
        max_bytes: Refuse a larger network.
        force: Replace files that exist.
        progress: Is told how much is done.

    >>> export_web("net.safetensors", "net.onnx", "www/net")
    >>> sorted(os.listdir("www/net"))
    ['config.json', 'elsa-files.json', 'model.ship.safetensors', 'onnx']
    """
    weights = weights_file(source)
    with open_level(weights, template, "dense", max_bytes=max_bytes) as opened:
        graph = _split(opened.binding)
        if any(opened.binding.model.weights[name].source for name in opened.binding.names):
            for _ in opened.blocks():  # a template with values of its own: compare them
                pass
    files = {GRAPH: graph, CONFIG: _config(Path(source))}
    ship(source, target, side_files=files, max_bytes=max_bytes, force=force, progress=progress)


def location(name: str) -> str:
    """The external file that a tensor is, as JavaScript's encodeURIComponent has it.

    >>> location("/layer.0/MatMul é")
    'elsa.%2Flayer.0%2FMatMul%20%C3%A9'
    """
    return "elsa." + urllib.parse.quote(name, safe="!'()*-._~")


def _split(binding: Binding) -> bytes:
    proto = binding.proto
    for name, info in binding.network.tensors.items():
        if name in binding.names:
            tensor = header_of(info)
            point_to(tensor, location(name), 0, info.nbytes)
            proto.graph.initializer.append(tensor)
    for weight in binding.rest.values():
        proto.graph.initializer.append(header_of(weight.info))
        proto.graph.initializer[-1].raw_data = weight.array().tobytes()
    graph: bytes = proto.SerializeToString(deterministic=True)
    return graph


def _config(source: Path) -> bytes:
    """The network's config.json, or one that says nothing of it; float32 is what its graph has."""
    path = source / CONFIG
    config: Any = {}
    if path.is_file():
        try:
            config = json.loads(path.read_bytes())
            config[_SETTINGS] = {"dtype": "fp32", **config.get(_SETTINGS, {})}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidOnnx(f"{path}: is no JSON object: {error}") from None
    else:
        config = {"model_type": "elsa", _SETTINGS: {"dtype": "fp32"}}
    text: str = json.dumps(config, ensure_ascii=False, indent=2)
    return text.encode()
