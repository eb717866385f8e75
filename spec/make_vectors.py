"""Make spec/vectors/: small valid and invalid files, their manifest, and embedding cases.

    python spec/make_vectors.py            write the vectors and the examples in the specifications
    python spec/make_vectors.py --check    compare with what is there; exit code 1 if it differs
    python spec/make_vectors.py --extended DIR   write them and about as many more elsewhere

Imports nothing of elsa_format. Every vector is put to the second implementation in plain_elsa.py,
or plain_delivery.py, before it is written: the valid ones have to pass, the invalid ones to give
exactly the error of the directory they are in.
"""

import argparse
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for those who run the file itself

from spec import plain_delivery
from spec import plain_elsa as plain
from spec.cases import (
    container,
    data,
    delivery,
    delivery_broken,
    delivery_example,
    level_files,
    level_shards,
    profile,
    shards,
    valid,
)
from spec.cases.build import dump
from spec.cases.checksums import checksum_cases
from spec.cases.collection import Collection, error_of
from spec.cases.embed import embed_cases
from spec.cases.listings import listing_cases
from spec.cases.written import written_cases

HERE = Path(__file__).resolve().parent
VECTORS = HERE / "vectors"
SPEC = HERE / "elsa-1.0.md"
DELIVERY = HERE / "delivery-1.0.md"
EXAMPLE = "valid/example.safetensors"
READ_INDEX: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "index": (plain.open_index, plain.validate_index),
    "level_index": (plain.open_level_index, plain.load_level_index),
    "delivery_index": (plain_delivery.open_index, plain_delivery.validate_index),
}


def annotate(raw: bytes) -> str:
    """The example file as annotated hex."""
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length]
    text = len(header.rstrip(b" "))
    elsa = plain.validate(raw)

    def line(at: int, size: int, note: str) -> str:
        return f"{at:08x}  {raw[at : at + size].hex(' '):<47}  {note}".rstrip()

    lines = [line(0, 8, f"N = {length}: the header's bytes, little-endian")]
    for at in range(8, 8 + text, 16):
        size = min(16, 8 + text - at)
        shown = "".join(chr(c) if 32 <= c < 127 else "." for c in raw[at : at + size])
        lines.append(line(at, size, f"|{shown}|"))
    for at in range(8 + text, 8 + length, 16):
        size = min(16, 8 + length - at)
        note = f"spaces, so that the data begins at {8 + length}" if at == 8 + text else ""
        lines.append(line(at, size, note))
    tau = elsa.profile["bits"]
    for i, word in enumerate(elsa.container.words("w")):
        (value,) = struct.unpack("<f", word.to_bytes(4, "little"))
        c = plain.counter(word, tau)
        kept = [f"level {t}" for t in range(1, elsa.levels + 1) if plain.keep(word, tau, t)]
        where = ", ".join([*kept, "dense"])
        note = f"w[{i // 3},{i % 3}] = {word:08x}, {value: .7f}, counter {c}: {where}"
        lines.append(line(8 + length + 4 * i, 4, note))
    digests = "\n".join(
        f"level {t}: {level['nonzero']} of 6 weights, {level['digest']}"
        for t, level in enumerate(elsa.profile["levels"], 1)
    )
    return f"```\n{chr(10).join(lines)}\n```\n\nIts levels:\n\n```\n{digests}\n```\n"


def with_example(spec: str, text: str, name: str = "example") -> str:
    """The specification's text with an example between its marks."""
    begin, end = f"<!-- {name}: made by make_vectors.py -->\n", f"<!-- end of {name} -->"
    before, rest = spec.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{text}\n{end}{after}"


def specifications(root: Path) -> dict[Path, str]:
    """The specifications with their examples, the vectors being below a directory."""
    elsa, delivered = SPEC.read_text(encoding="utf-8"), DELIVERY.read_text(encoding="utf-8")
    elsa = with_example(elsa, annotate((root / EXAMPLE).read_bytes()))
    text = delivery_example.annotate((root / delivery.EXAMPLE).read_bytes())
    delivered = with_example(delivered, text, "delivery example")
    text = delivery_example.annotate_stream()
    return {SPEC: elsa, DELIVERY: with_example(delivered, text, "stream example")}


def check_indexes(root: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Put the sharded vectors, which need their files on disk, to the second implementation."""
    for entry in entries:
        if entry["kind"] in READ_INDEX:
            path = root / entry["file"]
            open_, load = READ_INDEX[entry["kind"]]
            opened = error_of(partial(open_, path))
            found = opened or error_of(partial(load, path))
            if found != entry.get("error"):
                raise ValueError(f"{entry['file']} gives {found}")
            if found and not opened:
                entry["checked_by"] = "full"


def write_all(root: Path, *, extended: bool = False) -> None:
    """Write every vector, the manifest and the embedding cases below a directory."""
    out = Collection(extended)
    parts = (valid, container, profile, data, level_files, shards, level_shards)
    for part in (*parts, delivery, delivery_broken):
        part.add_cases(out)
    for file, raw in out.files.items():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(raw)
    check_indexes(root, out.entries)
    lines = ",\n".join(dump(entry) for entry in sorted(out.entries, key=lambda e: str(e["file"])))
    text = f'{{"spec":"ELSA 1.0","vectors":[\n{lines}\n]}}\n'
    (root / "manifest.json").write_text(text, encoding="utf-8")
    text = dump(embed_cases()).replace('{"dtype"', '\n{"dtype"').replace('"refused', '\n"refused')
    (root / "embed.json").write_text(text + "\n", encoding="utf-8")
    single = {"checksums": checksum_cases, "listings": listing_cases, "written": written_cases}
    for name, make in single.items():
        cases = make()
        lines = ",\n".join(f"{dump(key)}:{dump(value)}" for key, value in cases.items())
        (root / f"{name}.json").write_text(f"{{{lines}}}\n", encoding="utf-8")


def tree(root: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def main() -> int:
    """Write the vectors, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--extended", type=Path, metavar="DIR", help="write the larger set there")
    options = parser.parse_args()
    if options.extended:
        write_all(options.extended, extended=True)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        write_all(made)
        wanted = specifications(made)
        if options.check:
            new, old = tree(made), tree(VECTORS)
            differing = sorted(file for file in new | old if new.get(file) != old.get(file))
            for path, text in wanted.items():
                if path.read_text(encoding="utf-8") != text:
                    differing.append(path.name)
            for file in differing:
                print(f"{file} differs from what make_vectors.py makes", file=sys.stderr)
            return 1 if differing else 0
        shutil.rmtree(VECTORS, ignore_errors=True)
        shutil.copytree(made, VECTORS)
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
