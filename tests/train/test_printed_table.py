"""What a run tells on a terminal fits it, and leaves no half line."""

import fcntl
import os
import pty
import struct
import sys
import termios

import pytest
from internals import Report, Reporter, recipe_names
from internals import show_report as show
from terminal import on_a_terminal
from test_resume import ARGUMENTS

from elsa_train import FrozenLevel, Level

REPORT = Report("sparsify 97.5%", 1234, 39100, 0.5, 0.75, 0.9, 1, 256, "images", {})


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that makes standard error a terminal of some width, and what it showed."""
    opened = []

    def make(width):
        main, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 30, width, 0, 0))
        stream = open(other, "w", encoding="utf-8")  # noqa: SIM115
        monkeypatch.setattr(sys, "stderr", stream)
        opened.append((main, stream))

    def said():
        main, stream = opened.pop()
        stream.write("END")
        stream.flush()
        text = b""
        while not text.endswith(b"END"):
            text += os.read(main, 1000)
        stream.close()
        os.close(main)
        return text.decode()[:-3].replace("\r\n", "\n")

    return make, said


@pytest.mark.parametrize("width", [132, 80, 40, 20])
@pytest.mark.parametrize("phase", ["dense", "sparsify 97.5%", "alone, equal steps " * 9])
def test_progress_fits_a_terminal(terminal, width, phase):
    make, said = terminal
    make(width)
    reporter = Reporter(sys.stderr)
    last = REPORT._replace(phase=phase, step=REPORT.steps)  # the last step is always told
    for _ in range(2):
        reporter.watch(last)
    reporter.level(FrozenLevel(Level("97.5%", 0.975), 9, 0.975, {"bits_per_byte": 2.5}, "", ()))
    reporter.watch(last)
    reporter.close()
    *progress, rest = said().split("\r\x1b[K")
    assert rest == ""  # an error that follows begins at the left
    lines = [line for text in progress for line in text.split("\n")]
    assert max(map(len, lines)) <= width
    drawn = [line for line in lines if "step " in line]
    assert len(drawn) == 3
    assert max(map(len, drawn)) <= width - 3  # with ^C, too, the terminal does not break the line
    assert width < 40 or drawn[0][:3] == phase[:3]


def test_what_matters_least_is_left_out_first():
    assert show(REPORT, 1e4, 28, 75).endswith(
        "sparsity 90.00%  10000 images/s  0:00:28 left  run 0:01:15 left"
    )
    assert show(REPORT, 1e4, 28, 75, 82) == (
        "sparsify 97.5%: step 1234/39100  loss 0.5000  accuracy 75.00%  run 0:01:15 left"
    )
    assert show(REPORT, 1e4, 28, 75, 80) == (
        "sparsify 97.5%: step 1234/39100  loss 0.5000  run 0:01:15 left"
    )
    assert show(REPORT, 1e4, 28, 75, 50) == "sparsi…97.5%: step 1234/39100  run 0:01:15 left"
    assert show(REPORT, 1e4, 28, 75, 40) == "sparsify 97.5%: step 1234/39100"


@pytest.mark.parametrize("width", [60, 80])
def test_the_list_of_recipes_breaks_between_words(width):
    lines = on_a_terminal("train", "list", columns=width)
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()) == " ".join(
        " ".join(on_a_terminal("train", "list", columns=400)).split()
    )
    names = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert names == recipe_names()  # what follows is indented


def test_results_fit_the_terminal(tmp_path):
    words = ["train", "digits", "-o", tmp_path, *ARGUMENTS, "--plot", "none"]
    lines = on_a_terminal(*words, columns=40)
    begin = lines.index("level  actual sparsity   ELSA  reference")
    assert max(map(len, lines[begin : begin + 4])) <= 40
    assert lines[begin + 4] == f"wrote {tmp_path}/table.md"
    assert "| level | actual sparsity | ELSA | reference |" in (tmp_path / "table.md").read_text()
