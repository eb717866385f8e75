"""PP-OCRv4's recognition of text, on rendered lines; from the package rapidocr-onnxruntime."""

import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib
import numpy as np
import onnx
import onnxruntime
from elsa_converters.onnx import session
from internals import open_calibration
from numpy.random import Generator, default_rng
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from benchmarks.calibrate import scores
from benchmarks.calibrate.scores import Measure, Scores

MODEL = "models/ch_PP-OCRv4_rec_infer.onnx"
SIZE = WIDTH, HEIGHT = 320, 48
LONGEST = 22
"""Characters of a line."""
CALIBRATION, TEST, RARE = 64, 400, 100
"""Pictures to calibrate with, to test on, and to test characters on that the former never show."""
SYMBOLS = "@#$%&*()+=/<>[]{}_~"
"""Those characters."""
WORDS = sorted(set(re.findall(r"[A-Za-z][a-z]{2,10}", " ".join(topics.values()))))
FONTS = sorted(
    path for path in Path(matplotlib.get_data_path()).glob("fonts/ttf/DejaVu*.ttf")
    if "Display" not in path.name
)  # fmt: skip


def line(random: Generator) -> str:
    """A few words or numbers, as labels and receipts have them."""
    while True:
        words = []
        for _ in range(random.integers(1, 4)):
            word, kind = str(random.choice(WORDS)), random.random()
            if kind < 0.15:
                word = str(random.integers(10 ** random.integers(1, 6)))
            elif kind < 0.3:
                word = word.upper()
            if random.random() < 0.15:
                word += str(random.choice(list(",.:;-!?")))
            words.append(word)
        if len(text := " ".join(words)) <= LONGEST:
            return text


def with_symbols(random: Generator) -> str:
    """A word among symbols."""
    found = list(str(random.choice(WORDS))[:6])
    found += random.choice(list(SYMBOLS), random.integers(3, 7)).tolist()
    return "".join(random.permutation(found))


def picture(text: str, random: Generator) -> NDArray[np.float32]:
    """The text in some font, size and colours, a little turned, blurred and noisy."""
    path, size = str(random.choice(FONTS)), int(random.integers(20, 36))
    while (font := ImageFont.truetype(path, size)).getlength(text) > WIDTH - 14 and size > 12:
        size -= 1
    paper = random.integers(150, 256, 3)
    ink = np.clip(paper - random.integers(90, 200), 0, 255)
    if random.random() < 0.2:
        paper, ink = ink, paper
    image = Image.new("RGB", SIZE, tuple(paper.tolist()))
    at = int(random.integers(2, 10)), HEIGHT // 2 + int(random.integers(-4, 5))
    ImageDraw.Draw(image).text(at, text, tuple(ink.tolist()), font=font, anchor="lm")
    turn = float(random.normal(0, 0.8))
    image = image.rotate(turn, Image.Resampling.BILINEAR, fillcolor=tuple(paper.tolist()))
    image = image.filter(ImageFilter.GaussianBlur(float(random.uniform(0, 1.7))))
    pixels = np.asarray(image) / 255 + random.normal(0, random.uniform(0, 0.15), (*SIZE[::-1], 3))
    return ((np.clip(pixels, 0, 1) - 0.5) / 0.5).transpose(2, 0, 1).astype(np.float32)


def pictures(
    count: int, random: Generator, text: Callable[[Generator], str] = line
) -> tuple[NDArray[np.float32], list[str]]:
    """Pictures of lines, and what they say."""
    lines = [text(random) for _ in range(count)]
    return np.stack([picture(one, random) for one in lines]), lines


def distance(one: str, other: str) -> int:
    """How many characters to insert, delete or change.

    >>> distance("kitten", "sitting")
    3
    """
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


class Ocr:
    """The network and its test."""

    name, title = "ocr", "PP-OCRv4 recognition, 64 pictures"
    measures: Mapping[str, Measure] = {
        "right": Measure("characters right, %", 100, 1),
        "unseen": Measure("characters right that the samples never showed, %", 100, 1),
    }
    template = True

    def __init__(self, data: Path | None = None) -> None:
        """`data` is the model's path, if the package is not installed."""
        if data is None:
            found = find_spec("rapidocr_onnxruntime")
            if found is None or found.origin is None:
                raise SystemExit("rapidocr-onnxruntime is not installed: give --data MODEL.onnx")
            data = Path(found.origin).parent / MODEL
        self.source = data
        properties = {p.key: p.value for p in onnx.load(data).metadata_props}
        self.characters = ["", *properties["character"].splitlines(), " "]

    def calibration(self, draw: int, options) -> object:
        """Calibrate with the pictures of a draw."""
        feeds = {"x": pictures(CALIBRATION, default_rng([1, draw]))[0]}
        return open_calibration(self.source, feeds, options)

    def scores(self, packed: Path | None, level: int | str) -> dict[str, Scores]:
        """Read the test pictures; without a file, with the original."""
        options = onnxruntime.SessionOptions()
        options.enable_cpu_mem_arena = False
        if packed is None:
            net = onnxruntime.InferenceSession(self.source, options)
        else:
            net = session(packed, packed.with_suffix(".onnx"), level=level, sess_options=options)
        right, lengths = [], []
        images, lines = test_pictures()
        for read, text in zip(self._read(net, images), lines, strict=True):
            right.append(max(0, len(text) - distance(read, text)))
            lengths.append(len(text))
        seen, shown = [], []
        images, lines = rare_pictures()
        for read, text in zip(self._read(net, images), lines, strict=True):
            seen.append(sum(min(read.count(s), text.count(s)) for s in SYMBOLS))
            shown.append(sum(text.count(s) for s in SYMBOLS))
        return {"right": scores.of(right, lengths), "unseen": scores.of(seen, shown)}

    def _read(self, net: onnxruntime.InferenceSession, images: NDArray[np.float32]) -> list[str]:
        found = []
        for first in range(0, len(images), 16):
            (answers,) = net.run(None, {"x": images[first : first + 16]})
            for best in answers.argmax(-1):
                new = np.r_[True, best[1:] != best[:-1]]
                found.append("".join(self.characters[i] for i in best[new]).strip())
        return found


@cache
def test_pictures() -> tuple[NDArray[np.float32], list[str]]:
    """What all networks are tested on."""
    return pictures(TEST, default_rng([0, 0]))


@cache
def rare_pictures() -> tuple[NDArray[np.float32], list[str]]:
    """Those with symbols."""
    return pictures(RARE, default_rng([0, 1]), with_symbols)
