"""A file as one self-contained HTML page: levels, charts, layers, and on request the weights."""

import base64
import hashlib
import html
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from elsa_format._errors import InvalidOption
from elsa_format._layouts import LAYOUTS
from elsa_format._level_header import LevelSizes
from elsa_format._level_reader import LevelReader
from elsa_format._network import Network, open_network
from elsa_format._output import Target, open_output
from elsa_format._profile import KEY
from elsa_format._report.pictures import survey
from elsa_format._storage import Source
from elsa_format._storage.directory import is_directory
from elsa_format._threads import Meter, Progress, no_progress

MOST_METADATA = 1000
"""Characters of a metadata entry that the page shows; some hold whole tokenizers."""


def write_report(
    source: Source,
    target: Target,
    *,
    full: bool = False,
    measured: Sequence[Mapping[str, Any]] = (),
    max_bytes: int | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> int:
    """Write the report of an ELSA file and return its size in bytes.

    The header suffices; `full` reads the data too, once and in bounded memory, for pictures of the
    nested masks and the distribution of magnitudes. `measured` has a row for each level, as
    `elsa-bench` gives them, for a table of what they cost on a machine.

    >>> write_report("net.safetensors", "report.html") > 10_000
    True
    """
    with open_output(target, force=force, in_order=True) as output:
        with open_network(source, along=True, max_bytes=max_bytes) as network:
            if network.profile.single:
                raise InvalidOption(f"{network.name}: is a level file; a report is of an ELSA file")
            document = describe(network)
            document["measured"] = list(measured)
            if is_directory(source):  # its weights have the same name in all of them
                folder = os.path.basename(os.path.realpath(source))  # type: ignore[arg-type]
                document["file"]["name"] = _printable(folder)
            if full:
                meter = Meter(progress, network.header.data_size)
                with LevelReader(network, tick=meter.tick) as reader:
                    document["full"] = survey(reader)
        page = render(document)
        output.write_at(0, page)
        output.commit()
    return len(page)


def describe(network: Network) -> dict[str, Any]:
    """What the page shows of a header."""
    header, profile, tensors = network.header, network.profile, network.tensors
    varying = profile.varying
    sizes = LevelSizes(network)
    totals = [sum(counts) for counts in zip(*profile.nested.values(), strict=True)]
    return {
        "file": {
            "name": _printable(os.path.basename(network.name)),
            "size": network.file_size,
            "version": profile.version,
            "bits": profile.bits,
            "shard": profile.shard,
            "parameters": sum(info.elements for info in tensors.values()),
            "tensors": len(tensors),
            "weights": network.weights,
        },
        "levels": [
            {
                "name": level.name,
                "target": level.target,
                "pattern": level.pattern,
                # Of this file: in a shard, the profile's own number counts the whole network.
                "kept": totals[t - 1] if totals else 0,
                "digest": level.digest,
                "metrics": dict(level.metrics),
                "sizes": [sizes.size(t, layout) for layout in LAYOUTS],
            }
            for t, level in enumerate(profile.levels, 1)
        ],
        "dense": {
            "metrics": dict(profile.dense_metrics),
            "size": sizes.size("dense", "dense"),
        },
        "layers": [
            {
                "name": name,
                "dtype": info.dtype.name,
                "shape": info.shape,
                "weights": info.elements,
                "kept": profile.nested[name],
            }
            for name, info in tensors.items()
            if name in profile.nested
        ],
        "others": [
            [name, "per-level" if name in varying else "shared", info.dtype.name, info.shape]
            for name, info in tensors.items()
            if name not in profile.nested
        ],
        "metadata": [
            [key, text[:MOST_METADATA], len(text)]
            for key, text in sorted(header.metadata.items())
            if key != KEY
        ],
        "measured": [],
        "downloads": list(network.downloads.values()) or None,
        "full": None,
    }


def render(document: Mapping[str, Any]) -> bytes:
    """The page for a description; nothing in it can run but the page's own script."""
    folder = resources.files("elsa_format") / "_report"
    style, script, page = (
        (folder / name).read_text("utf-8") for name in ("report.css", "report.js", "report.html")
    )
    parts = {
        "POLICY": f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "TITLE": html.escape(document["file"]["name"]),
        "STYLE": style,
        "DATA": _embeddable(document),
        "SCRIPT": script,
    }
    # Cut once, so that a name that looks like a placeholder stays a name.
    pieces = page.split("%%")
    pieces[1::2] = [parts[name] for name in pieces[1::2]]
    return "".join(pieces).encode("utf-8")


def _source(text: str) -> str:
    """An inline style or script as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embeddable(document: Mapping[str, Any]) -> str:
    """JSON that is safe inside a script element: no tag, comment or entity can begin in it."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _printable(path: str) -> str:
    """A file name with bytes that are not UTF-8 replaced."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
