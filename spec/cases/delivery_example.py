"""The file and the byte stream that delivery-1.0.md prints, down to their bits."""

import struct
from collections import Counter

from spec import plain_delivery as delivery
from spec.cases.build import Entry, describe, floats, pack_words, written_elsa_file
from spec.plain_elsa import MANTISSA, WIDTH, counter

DIGITS = bytes(map(int, "314159265358979323846264"))
"""Of π: a byte stream that is worth coding, though only just."""

# Weights and their counters. Level 1 keeps the last of each row; one dense-only weight is zero.
WEIGHTS = [
    [(0.5, 2), (0.0625, 0), (-0.375, 2), (0.04, 0), (0.09, 0), (-0.25, 2), (0.03, 0), (1.5, 1)],
    [(-0.12, 0), (0.3, 2), (0.28, 2), (-0.07, 0), (0.0, 0), (-0.6, 2), (0.11, 0), (-1.5, 1)],
    [(0.02, 0), (0.33, 2), (-0.05, 0), (0.7, 2), (0.08, 0), (0.06, 0), (-0.4, 2), (1.5, 1)],
    [(-0.45, 2), (-0.1, 0), (0.055, 0), (0.26, 2), (-0.035, 0), (0.55, 2), (0.13, 0), (-1.5, 1)],
]


def source() -> bytes:
    """The network: a matrix in BF16 with two levels, and a bias."""
    words = []
    for value, c in (pair for row in WEIGHTS for pair in row):
        (word,) = struct.unpack("<I", struct.pack("<f", value))
        words.append((word >> 16) & ~3 | c)
    entries = [
        floats("b", [0.5, -0.25]),
        Entry("w", "BF16", [4, 8], pack_words("BF16", words)),
    ]
    profile = describe(entries, 2, ["87%", "50%"], ["w"], digests=False, checksums=False)
    return written_elsa_file(entries, profile)


class Page:
    """Hex of bytes, one field after the other, with notes."""

    def __init__(self, raw: bytes, at: int = 0) -> None:
        self.raw = raw
        self.at = at
        self.lines: list[str] = []

    def show(self, size: int, note: str) -> None:
        """The next bytes; the note stands beside the first of them."""
        for at in range(self.at, self.at + size, 16):
            shown = self.raw[at : min(at + 16, self.at + size)].hex(" ")
            self.lines.append(f"{at:08x}  {shown:<47}  {note}".rstrip())
            note = ""
        self.at += size

    def text(self, size: int) -> None:
        """The next bytes, as characters too."""
        end = self.at + size
        while self.at < end:
            piece = self.raw[self.at : min(self.at + 16, end)]
            characters = "".join(chr(c) if 32 <= c < 127 else "." for c in piece)
            self.show(len(piece), f"|{characters}|")

    def header(self, header: bytes, note: str) -> None:
        """A header length, a header and its padding."""
        text = len(header.rstrip(b" "))
        self.show(8, f"{note}: N = {len(header)}")
        self.text(text)
        if spaces := len(header) - text:
            shown = f"20 × {spaces}"
            self.lines.append(f"{self.at:08x}  {shown:<47}  spaces")
            self.at += spaces

    def remark(self, text: str) -> None:
        """A line without bytes."""
        self.lines.append(" " * 59 + text)

    def title(self, text: str) -> None:
        """A line that begins something."""
        self.lines += ["", text]


def bits_of(data: bytes) -> str:
    """The bits of bytes as they are read: the least significant of each first."""
    return "".join(map(str, delivery.unpack(data)))


def show_stream(page: Page, fields: delivery.Fields, n: int, what: str) -> bytes:
    """A byte stream (§8)."""
    kind = fields.data[fields.at]
    start = fields.at
    data = delivery.read_stream(fields, n)
    if kind == 0:
        page.show(1, f"{what}: byte stream of type 0, raw")
        page.show(n, " ".join(map(str, data)))
    elif kind == 1:
        page.show(2, f"{what}: byte stream of type 1, {n} times {data[0]}")
    else:
        page.show(1, f"{what}: byte stream of type 2, Huffman code")
        show_huffman(page, delivery.Fields(fields.data[start + 1 : fields.at]), data)
    return data


def show_huffman(page: Page, fields: delivery.Fields, data: bytes) -> None:
    """A code and its four bit streams (§8.3)."""
    last = fields.byte()
    page.show(1, f"last = {last}")
    show_lengths(page, fields, last)
    start = fields.at
    lengths = delivery.code_lengths(Counter(data))
    code = delivery.codewords(lengths)
    sizes = [fields.varint() for _ in range(4)]
    page.show(fields.at - start, f"bytes of the bit streams: {', '.join(map(str, sizes))}")
    at = 0
    for size, count in zip(sizes, delivery.quarters(len(data)), strict=True):
        symbols = data[at : at + count]
        words = [code[symbol] for symbol in symbols]
        unused = bits_of(fields.take(size))[len("".join(words)) :]
        page.show(size, " ".join(words) + (f" | {unused} unused" if unused else ""))
        page.remark("= " + " ".join(map(str, symbols)))
        at += count


def show_lengths(page: Page, fields: delivery.Fields, last: int) -> None:
    """The lengths of a code: ones and a zero for the place of each in the list (§8.3)."""
    start = fields.at
    lengths = delivery.read_lengths(fields, last + 1)
    bits = bits_of(fields.data[start : fields.at])
    *places, unused = bits.split("0", last + 1)
    shown = " ".join(place + "0" for place in places) + (f" | {unused} unused" if unused else "")
    page.show(fields.at - start, "places of the lengths in the list, one after the other:")
    page.remark(shown)
    page.remark(f"= lengths of symbols 0…{last}: " + " ".join(map(str, lengths)))


def show_positions(page: Page, fields: delivery.Fields, k: int, r: int) -> None:
    """Which words are taken (§6)."""
    start = fields.at
    mode = fields.data[start]
    delivery.read_positions(fields, k, r)
    inner = delivery.Fields(fields.data[: fields.at])
    inner.at = start + 1
    if mode == 0:
        page.show(1, f"mode 0: all {r} words that are left")
    elif mode == 3:
        page.show(1, f"mode 3: a bit for each of the {r} words that are left")
        bits = bits_of(inner.take(-(-r // 8)))
        unused = f" | {bits[r:]} unused" if bits[r:] else ""
        shown = " ".join(bits[i : min(i + 8, r)] for i in range(0, r, 8))
        page.show(-(-r // 8), shown + unused)
    else:
        marks = "taken" if mode == 1 else "not taken"
        page.show(1, f"mode {mode}: gaps before the words that are {marks}, {r} being left")
        g = inner.varint()
        page.show(inner.at - start - 1, f"g = {g} gaps")
        show_stream(page, inner, g, "gaps")


def show_values(
    page: Page, fields: delivery.Fields, k: int, dtype: str, tau: int, c: int
) -> list[int]:
    """The words (§7)."""
    start = fields.at
    words = delivery.read_values(fields, k, dtype, tau, c)
    inner = delivery.Fields(fields.data[: fields.at])
    inner.at = start
    h = inner.byte()
    s, width = MANTISSA[dtype] - h, WIDTH[dtype]
    page.show(1, f"h = {h}: s = {s}, rests of R = {s - tau + 1} bits")
    top = inner.varint()
    page.show(inner.at - start - 1, f"top = {top} = {top:0{width - 1 - s}b}b")
    stream = show_stream(page, inner, k, "distances")
    for i in range(stream.count(255)):
        word = int.from_bytes(inner.take(width // 8), "little")
        page.show(width // 8, f"escape {i}: the word {word:0{width // 4}x}")
    planes, above = divmod(s - tau + 1, 8)
    for i in range(planes):
        show_stream(page, inner, k, f"bits {8 * i}…{8 * i + 7} of the rests")
    if above:
        data = inner.take(-(-k * above // 8))
        bits = bits_of(data)
        fielded = [bits[i : i + above] for i in range(0, k * above, above)]
        unused = bits[k * above :]
        what = "sign of each word" if above == 1 and not planes else f"{above} highest bits of each"
        shown = " ".join(fielded) + (f" | {unused} unused" if unused else "")
        page.show(len(data), f"{what}, lowest first: {shown}")
    word, d = words[0], stream[0]
    low = (word & (1 << s) - 1) >> tau
    pieces = [f"{word >> (width - 1)} << {width - 1}", f"({top} − {d}) << {s}"]
    pieces += [f"{low} << {tau}"] if s > tau else []
    pieces += [str(c)] if tau else []
    page.remark(f"the first word: {' | '.join(pieces)} = {word:0{width // 4}x}")
    return words


def annotate(raw: bytes) -> str:
    """The example as annotated hex."""
    opened = delivery.validate(raw)
    plan, tau = opened.plan, opened.source.profile["bits"]
    header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    page = Page(raw)
    page.header(header, "the header's length")
    page.title(f"the head, {opened.ends[0]} bytes:")
    page.show(2, "zlib: deflate with a window of 32 kB")
    page.show(5, f"the last block, stored, of {len(opened.head)} bytes")
    page.header(opened.head[8:], "the source's header length")
    page.show(4, "Adler-32 of these bytes")
    left = list(range(plan.nested[0].length))
    stored = plan.nested[0].names[0]
    columns = opened.source.container.tensors[stored].shape[1]
    words_of: dict[int, int] = {}
    for t in range(1, opened.levels + 2):
        c = t if t <= opened.levels else 0
        sequences = [*plan.plain[t - 1], *plan.nested]
        part = opened.part(t)
        name = f"part {t}" if c else "the dense part"
        page.title(f"{name}, {len(part)} bytes; index:")
        for run in sequences:
            size = int.from_bytes(raw[page.at : page.at + 3], "little")
            page.show(3, f"{size} bytes for the words of {run.names[0]}, {run.dtype}")
        for run, payload in zip(sequences, opened.payloads(t), strict=True):
            fields = delivery.Fields(payload)
            dtype = run.dtype
            page.title(f"the words of {run.names[0]} in {name}:")
            page.show(8, "XXH3-64 of what follows, that of the source's header being the seed")
            if run in plan.plain[t - 1]:
                words = show_values(page, fields, run.length, dtype, 0, 0)
                places = [f"{run.names[0]}[{i}]" for i in range(run.length)]
            else:
                k = fields.varint()
                page.show(fields.at, f"k = {k} words with the counter {c}")
                mark = fields.at
                taken = delivery.read_positions(fields, k, len(left))
                fields.at = mark
                show_positions(page, fields, k, len(left))
                words = show_values(page, fields, k, dtype, tau, c)
                chosen = [i for i, flag in zip(left, taken, strict=True) if flag]
                left = [i for i, flag in zip(left, taken, strict=True) if not flag]
                places = [f"{stored}[{i // columns},{i % columns}]" for i in chosen]
                words_of.update(zip(chosen, words, strict=True))
            fields.end()
            shown = [
                f"{place} = {word:0{WIDTH[dtype] // 4}x}"
                for place, word in zip(places, words, strict=True)
            ]
            for i in range(0, len(shown), 4):
                page.remark(("→ " if i == 0 else "  ") + "  ".join(shown[i : i + 4]))
    if page.at != len(raw) or any(
        counter(word, tau) != WEIGHTS[i // columns][i % columns][1] for i, word in words_of.items()
    ):
        raise ValueError("the example is not what its annotation says")
    return "```\n" + "\n".join(page.lines) + "\n```\n"


def annotate_stream() -> str:
    """A byte stream of type 2, from its bytes to its bits."""
    count = Counter(DIGITS)
    lengths = delivery.code_lengths(count)
    code = delivery.codewords(lengths)
    rows = {
        "symbol": map(str, sorted(code)),
        "count": (str(count[symbol]) for symbol in sorted(code)),
        "length": (str(lengths[symbol]) for symbol in sorted(code)),
        "codeword": (code[symbol] for symbol in sorted(code)),
    }
    table = [
        f"{name:<10}" + "".join(f"{cell:>6}" for cell in cells) for name, cells in rows.items()
    ]
    raw = delivery.write_stream(DIGITS)
    page = Page(raw)
    show_stream(page, delivery.Fields(raw), len(DIGITS), f"{len(DIGITS)} bytes")
    bytes_ = f"{'bytes':<10}    " + " ".join(map(str, DIGITS))
    return "```\n" + "\n".join([bytes_, *table, "", *page.lines]) + "\n```\n"
