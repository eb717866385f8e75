"""Texts of files: which there are, without reading them all, and some of them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from elsa_converters._errors import InvalidData

LONGEST = 1 << 26
"""Bytes of a text file that are looked at."""
WIDE = 5
"""Characters of a file that are read for each token of a sample: few languages need more."""


class Text(NamedTuple):
    """A sample of text."""

    text: str
    target: str | None = None
    """What the decoder of an encoder-decoder reads; without it, the text."""


class Part(NamedTuple):
    """A line of a .jsonl file, or some characters of a .txt file."""

    path: Path
    number: int
    text: str


def find_texts(path: str | os.PathLike[str], length: int) -> list[Part]:
    """Every sample that a file or the files of a directory could give."""
    place = Path(path)
    if place.is_dir():
        files = sorted(p for p in place.iterdir() if p.suffix in (".txt", ".jsonl"))
        if not files:
            raise InvalidData(f"{place}: holds no .txt or .jsonl file")
    else:
        files = [place]
    found = []
    for file in files:
        if file.suffix not in (".txt", ".jsonl"):
            raise InvalidData(
                f"{file}: expected text (.txt, .jsonl), arrays (.npz, .npy) or a directory of them"
            )
        words = _read(file)
        if file.suffix == ".jsonl":
            lines = enumerate(words.splitlines(), 1)
            found += [Part(file, number, line) for number, line in lines if line.strip()]
        else:
            found += [Part(file, 0, text) for text in _windows(words, WIDE * length)]
    if not found:
        raise InvalidData(f"{place}: holds no text")
    return found


def read_texts(parts: Sequence[Part], most: int) -> list[Text]:
    """So many samples, at equal distances."""
    count = min(most, len(parts))
    chosen = [parts[at * len(parts) // count] for at in range(count)]
    return [_line(part) if part.number else Text(part.text) for part in chosen]


def _read(path: Path) -> str:
    with open(path, "rb") as file:
        data = file.read(LONGEST)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.start >= LONGEST - 4:  # the end of what is looked at, amid a character
            return data[: error.start].decode()
        raise InvalidData(f"{path}: is not UTF-8 text") from None


def _windows(words: str, width: int) -> list[str]:
    """A text in pieces of about so many characters, cut where there is a space."""
    found, start = [], 0
    while start < len(words):
        end = start + width
        if end < len(words):
            spaces = [words.rfind(space, start + width // 2, end) for space in " \n"]
            end = max(*spaces) + 1 or end
        found.append(words[start:end].strip())
        start = end
    return [piece for piece in found if piece]


def _line(part: Part) -> Text:
    where = f"{part.path}: line {part.number}"
    try:
        found = json.loads(part.text)
    except (ValueError, RecursionError):
        raise InvalidData(f"{where}: is no JSON") from None
    if not isinstance(found, dict) or not isinstance(found.get("text"), str):
        keys = ", ".join(map(repr, found)) if isinstance(found, dict) else type(found).__name__
        raise InvalidData(f"{where}: found {keys}, expected an object with a string 'text'")
    target = found.get("target")
    if target is not None and not isinstance(target, str):
        raise InvalidData(f"{where}: 'target' is no string")
    return Text(found["text"], target)
