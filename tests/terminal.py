"""Run a command on a terminal of some width."""

import os
import struct
import subprocess
import sys
from pathlib import Path

BIN = Path(sys.executable).parent


def on_a_terminal(*words: object, columns: int = 80) -> list[str]:
    """The lines that a command prints on a terminal."""
    import fcntl
    import pty
    import termios  # not on Windows

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(
        [str(BIN / "elsa"), *map(str, words)], stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                data = os.read(ours, 1 << 16)
            except OSError:  # the last of the other side was closed
                data = b""
            if not data:
                break
            output += data
    os.close(ours)
    assert process.returncode == 0, output
    return output.decode().replace("\r\n", "\n").splitlines()
