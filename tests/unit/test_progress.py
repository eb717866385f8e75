"""The progress line: it fits its terminal, and tells the truth about the time left."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from internals import Bar, _progress, clock, import_line, progress


class Clock:
    """Time that passes when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(_progress.time, "monotonic", lambda: self.now)


def stream(encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)


def lines(written: io.TextIOWrapper) -> list[str]:
    """What the line showed, one after the other."""
    text = written.buffer.getvalue().decode(written.encoding)  # type: ignore[attr-defined]
    return [line.rstrip(" ") for line in text.split("\r")]


@given(
    width=st.integers(20, 300),
    verb=st.sampled_from(["packing", "extracting", "verifying"]),
    part=st.floats(0, 1),
    speed=st.floats(0, 1e15),
    seconds=st.floats(0, 359_999),
)
def test_it_fits_any_width(
    width: int, verb: str, part: float, speed: float, seconds: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_progress, "columns", lambda stream: width)
        bar = Bar(verb, written := stream())
        bar.speed = speed
        bar.show(part, f"{clock(seconds)} left")
    _, line = lines(written)
    assert len(line) < width
    assert f"{int(100 * part)}%" in line
    assert f"{clock(seconds)} left" in line
    if width >= 80:
        assert line.startswith(f"{verb} ")
        assert "/s" in line
        assert line.count("█") + line.count("░") == 30


def test_wide_ones_show_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "columns", lambda stream: 80)
    bar = Bar("packing", written := stream())
    bar.speed = 1.5e9
    bar.show(0.5, "1:15 left")
    assert lines(written)[-1] == f"packing {15 * '█'}{15 * '░'}  50%  1.5 GB/s  1:15 left"


def test_ascii_terminals_get_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "columns", lambda stream: 80)
    bar = Bar("packing", written := stream("ascii"))
    bar.show(0.5, "")
    assert lines(written)[-1] == f"packing {15 * '#'}{15 * '-'}  50%  0 B/s"


def test_a_shorter_line_leaves_nothing_of_a_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "columns", lambda stream: 80)
    bar = Bar("packing", written := stream())
    bar.show(0.1, "12:34:56 left")
    bar.show(0.1, "")
    bar.clear()
    parts = written.buffer.getvalue().decode().split("\r")  # type: ignore[attr-defined]
    assert len(parts[2]) == len(parts[1])
    assert parts[3:] == [" " * len(parts[2].rstrip()), ""]


def seconds_left(line: str) -> float | None:
    found = re.search(r"(?:(\d+):)?(\d+):(\d\d) left", line)
    if found is None:
        return None
    return 3600 * int(found[1] or 0) + 60 * int(found[2]) + int(found[3])


def run(clock: Clock, bar: Bar, speeds: list[tuple[float, float]]) -> list[tuple[float, str]]:
    """Go through bytes at speeds (bytes, bytes per second); when, and what the line then says."""
    total = sum(size for size, _ in speeds)
    done, begin, shown = 0.0, clock.now, []
    for size, speed in speeds:
        end = done + size
        while done < end:
            step = min(speed / 50, end - done)
            clock.now += step / speed
            done += step
            bar(int(done), int(total))
            shown.append((clock.now - begin, lines(bar.stream)[-1]))  # type: ignore[arg-type]
    return shown


def test_nothing_is_drawn_in_the_first_second(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock(monkeypatch)
    bar = Bar("packing", written := stream())
    run(time, bar, [(950, 1000)])
    bar.clear()
    assert lines(written) == [""]


def test_the_time_left_follows_what_is_done_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in packing, where reading for thresholds is four times as fast as writing with digests."""
    time = Clock(monkeypatch)
    shown = run(time, Bar("packing", stream()), [(40_000, 4000), (20_000, 1000)])
    for at, line in shown:
        left = seconds_left(line)
        if at < 3:
            assert left is None
        elif 3.2 < at < 9.8:
            assert left == pytest.approx((60_000 - 4000 * at) / 4000, abs=1.5)
        elif 20 < at < 29.8:
            assert left == pytest.approx(30 - at, rel=0.2, abs=1.5)


def test_no_absurd_time_after_a_slow_start(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock(monkeypatch)
    shown = run(time, Bar("packing", stream()), [(1.2, 1), (10_000, 1000)])
    found = [left for _, line in shown if (left := seconds_left(line)) is not None]
    assert found
    assert max(found) < 25


def test_what_follows_is_timed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when layers are solved, and then bytes are written."""
    time = Clock(monkeypatch)
    bar = Bar("solving", written := stream())
    run(time, bar, [(10_000, 100)])
    bar.doing("packing")
    for second in range(1, 20):
        time.now += 0.5
        bar(second * 1000, 10**6)
        left = seconds_left(lines(written)[-1])
        if second < 7:
            assert left is None or "solving" in lines(written)[-1]
        else:
            assert left == pytest.approx((10**6 - second * 1000) / 2000, rel=0.1)


def test_who_is_stuck_makes_no_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Clock(monkeypatch)
    bar = Bar("packing", written := stream())
    for second in range(20):
        time.now += 1
        bar(0, 10**12)
        assert second > 300 or seconds_left(lines(written)[-1]) is None


# --- Real terminals ------------------------------------------------------------------------------


def resize(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def test_the_line_follows_the_size_of_the_terminal() -> None:
    own, theirs = pty.openpty()
    with open(theirs, "w", encoding="utf-8") as terminal:
        bar = Bar("extracting", terminal)
        for columns in (120, 20, 45, 0):
            resize(own, columns)
            bar.show(0.3, "2:05 left")
            text = os.read(own, 4096).decode()
            assert text.startswith("\r")
            assert 0 < len(text.strip()) < (columns or 81)
            assert len(text) <= (columns or 81)
    os.close(own)


SCRIPT = f"""
import sys
{import_line("_progress")}
_progress.FIRST = _progress.PERIOD = _progress.SURE = 0
{import_line("_start")}
getattr(_start, sys.argv.pop(1))()
"""


def on_a_terminal(columns: int, *words: object, **environment: str) -> tuple[str, bytes]:
    """What a command writes to a terminal, and to its standard output, which is none."""
    own, theirs = pty.openpty()
    resize(own, columns)
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, **environment},
    ) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                text += os.read(own, 4096)
            except OSError:  # the other end is closed
                break
        assert process.stdout is not None
        output = process.stdout.read()
    os.close(own)
    assert process.returncode == 0, text
    return text.decode(), output


@pytest.mark.parametrize(
    "environment", [{"TERM": "xterm"}, {"TERM": "dumb"}, {"NO_COLOR": "1"}, {"LC_ALL": "C"}]
)
@pytest.mark.parametrize("columns", [20, 45, 100])
def test_commands_draw_and_clean_up(
    columns: int, environment: dict[str, str], rich: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    text, _ = on_a_terminal(columns, "extract", rich, "-l", 1, "-o", out, **environment)
    text = text.replace("\r\n  ", " ")  # the summary is wrapped; a newline is \r\n
    drawn, summary = text.rsplit("\r", 2)[0], text.rsplit("\r", 2)[1]
    assert summary == f"{out}: level 1, {out.stat().st_size / 1000:.3g} kB as dense"
    assert drawn.count("\r") > 5
    assert "\x1b" not in text
    shown = drawn.split("\r")
    assert all(len(line) < columns for line in shown)
    assert "100%" in shown[-2]
    assert shown[-1].strip() == ""


def test_quiet_draws_nothing(rich: Path, tmp_path: Path) -> None:
    words: tuple[Any, ...] = ("extract", rich, "-l", 1, "-o", tmp_path / "out", "--quiet")
    assert on_a_terminal(80, *words)[0] == ""


def test_data_on_standard_output_stays_whole(rich: Path) -> None:
    text, output = on_a_terminal(80, "extract", rich, "-l", 1, "-o", "-")
    assert "100%" in text
    plain = subprocess.run(
        [sys.executable, "-c", SCRIPT, "extract", rich, "-l", "1", "-o", "-"],
        capture_output=True,
        check=True,
    )
    assert plain.stdout == output
    assert plain.stderr == b""  # not a terminal


def test_without_standard_error_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with progress("packing") as shown:
        shown(1, 2)
