"""A network as one self-contained HTML page: levels, charts, layers, and on request the weights."""

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from elsa_format import InvalidOption, inspect
from elsa_format.plugins import Progress, Source, Target, no_progress, open_output

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

    >>> write_report("net.safetensors", "report.html") > 10_000
    True

    Args:
        source: The file, shard index, model directory or URL, or a binary stream.
        target: Where the report goes: a path, a URL of an object store, or a binary stream.
        full: Read the data too, once and in bounded memory, for pictures of the nested masks and
            the distribution of magnitudes. Otherwise the header suffices.
        measured: A row for each level, as `elsa-bench --json` prints them, for a table of what
            levels cost on a machine. Metrics in them go before those that the file records.
        max_bytes: Refuse a network whose header or tensors take more than this.
        force: Replace a report that exists.
        progress: Called with the bytes of data that were read, and how many there are.

    Returns:
        Bytes of the report.

    Raises:
        InvalidOption: The source is a level file.
        OutputExists: The target exists, and `force` is not given.
    """
    with open_output(target, force=force, in_order=True) as output:
        inspected = inspect(source, full=full, max_bytes=max_bytes, progress=progress)
        page = render(inspected, measured)
        output.write_at(0, page)
        output.commit()
    return len(page)


def render(inspected: Mapping[str, Any], measured: Sequence[Mapping[str, Any]] = ()) -> bytes:
    """Make the report from what `elsa-inspect --json` prints, with `--full` or without.

    Nothing in it can run but the page's own script.

    >>> from elsa_format import inspect
    >>> render(inspect("net.safetensors")).startswith(b"<!doctype html>")
    True

    Args:
        inspected: What `elsa_format.inspect` returned, or its JSON, read again.
        measured: A row for each level, as `elsa-bench --json` prints them. Metrics in them go
            before those that the file records.

    Returns:
        The HTML, in UTF-8.

    Raises:
        InvalidOption: A level file was inspected.
    """
    if "levels" not in inspected:
        raise InvalidOption(f"{inspected['path']}: is a level file; a report is of an ELSA file")
    document = {**describe(inspected), "measured": list(measured)}
    _add_metrics(document, measured)
    folder = resources.files("elsa_report")
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


def describe(inspected: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's script reads, in its order: less than was inspected, and shorter."""
    tensors, levels, dense = (inspected[name] for name in ("tensors", "levels", "dense"))
    nested = [tensor for tensor in tensors if tensor["kind"] == "nested"]
    delivery = inspected.get("delivery")
    return {
        "file": {
            "name": _printable(inspected["title"]),
            "size": inspected["file_size"],
            "version": inspected["version"],
            "bits": inspected["bits"],
            "shard": inspected["shard"],
            "parameters": inspected["parameters"],
            "tensors": len(tensors),
            "weights": inspected["nested_weights"],
        },
        "levels": [
            {
                "name": level["name"],
                "target": level["target"],
                "pattern": level["pattern"],
                # Of this file: in a shard, the profile's own number counts the whole network.
                "kept": sum(tensor["kept"][at] for tensor in nested),
                "digest": level["digest"],
                "metrics": dict(level["metrics"]),
                "errors": dict(level["errors"]),
                "sizes": [level["sizes"][layout] for layout in ("dense", "bitmask", "csr")],
            }
            for at, level in enumerate(levels)
        ],
        "dense": {
            "metrics": dict(dense["metrics"]),
            "errors": dict(dense["errors"]),
            "size": dense["size"],
        },
        "better": {name: about["better"] for name, about in inspected["metrics"].items()},
        "layers": [
            {
                "name": tensor["name"],
                "dtype": tensor["dtype"],
                "shape": tensor["shape"],
                "weights": math.prod(tensor["shape"]),
                "kept": tensor["kept"],
            }
            for tensor in nested
        ],
        "others": [
            [tensor[field] for field in ("name", "kind", "dtype", "shape")]
            for tensor in tensors
            if tensor["kind"] != "nested"
        ],
        "metadata": [
            [key, text[:MOST_METADATA], len(text)]
            for key, text in sorted(inspected["metadata"].items())
        ],
        "measured": [],
        "downloads": delivery and [level["size"] for level in delivery["levels"]],
        "estimates": [network["download_estimate"] for network in [*levels, dense]],
        "full": _numbered(inspected["full"], nested) if "full" in inspected else None,
    }


def _add_metrics(document: dict[str, Any], measured: Sequence[Mapping[str, Any]]) -> None:
    """What was measured goes before what the file records."""
    for row in measured:
        dense = row["level"] == "dense"
        network = document["dense"] if dense else document["levels"][row["level"] - 1]
        for name, metric in row.get("metrics", {}).items():
            network["metrics"][name] = metric["value"]
            network["errors"].pop(name, None)
            if metric["error"] is not None:
                network["errors"][name] = metric["error"]
            document["better"][name] = metric["better"]


def _numbered(full: Mapping[str, Any], nested: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The survey with layers by their numbers: no name can be taken for what the script knows."""
    numbers = {tensor["name"]: at for at, tensor in enumerate(nested)}

    def by_number(layers: Mapping[str, Any]) -> dict[int, Any]:
        return {numbers[name]: value for name, value in layers.items()}

    magnitudes = full["magnitudes"]
    return {
        **full,
        "pictures": by_number(full["pictures"]),
        "magnitudes": {**magnitudes, "layers": by_number(magnitudes["layers"])},
    }


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
