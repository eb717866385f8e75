"""elsa-bench --record: what was measured goes into the file that it was measured of."""

import os
from collections.abc import Mapping
from typing import Any

from elsa_format import InputChanged, InvalidOption, Metric, __version__, record
from elsa_format.plugins import LevelLike, LevelNumber, is_url, open_network


class Recording:
    """A file that metrics are going to be recorded in, as it was before they were measured."""

    def __init__(self, source: str, template: str | None) -> None:
        if is_url(source):
            raise InvalidOption(f"{source}: is at a URL, expected a file here to record metrics in")
        self.source, self.template = source, template
        with open_network(source) as network:
            if network.kind != "elsa":
                raise InvalidOption(
                    f"{source}: is a {network.kind} file; record metrics in its ELSA file"
                )
            files = [file.name for file in network.files]
        self._before = self._headers()
        self._points = template is not None and _points_into(template, files)

    def _headers(self) -> list[bytes]:
        """The headers of all files, which have the checksums of the tensors."""
        with open_network(self.source) as network:
            return [file.header.raw for file in network.files]

    def write(self, metrics: Mapping[LevelNumber, Mapping[str, Metric]]) -> None:
        """Record the metrics; a template that points into the file does so again afterwards."""
        if self._headers() != self._before:
            raise InputChanged(f"{self.source}: changed while it was measured; measure it again")
        found: Mapping[LevelLike, Any] = {level: metrics[level] for level in metrics}
        record(self.source, None, found, recorded=f"elsa-bench {__version__}")
        if self._points and self.template is not None:
            from elsa_converters.onnx import renew_template

            renew_template(self.template, self.source)


def _points_into(template: str, files: list[str]) -> bool:
    """Whether a model's weights are in these files: then another header moves them."""
    from elsa_converters.onnx._model.read import data_files

    found: set[Any] = {os.path.realpath(path) for path in data_files(template)}
    return not found.isdisjoint(map(os.path.realpath, files))
