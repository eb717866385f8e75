"""What Windows lacks or does otherwise, imitated on Linux by hiding and changing calls of `os`."""

import errno
import os
import tempfile
from typing import Any

import pytest

LACKING = (
    *("preadv", "pread", "pwritev", "pwrite", "posix_fadvise", "posix_fallocate", "sendfile"),
    *("copy_file_range", "memfd_create", "fdatasync", "fchmod", "fork", "register_at_fork"),
    *("O_TMPFILE", "O_DIRECTORY", "O_CLOEXEC", "sched_getaffinity", "mkfifo", "geteuid"),
)
BINARY = 0x8000


def imitate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what Windows has not; refuse what it refuses; write lines as it does."""
    for name in LACKING:
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(os, "O_BINARY", BINARY, raising=False)
    monkeypatch.setattr(tempfile, "TemporaryFile", tempfile.NamedTemporaryFile)
    text = set[int]()
    open_, write, link, rename = os.open, os.write, os.link, os.rename

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        if dir_fd is not None:
            raise NotImplementedError("dir_fd unavailable on this platform")
        fd = open_(path, flags & ~BINARY, mode)
        (text.discard if flags & BINARY else text.add)(fd)
        return fd

    def written(fd: int, data: Any) -> int:
        if fd not in text:
            return write(fd, data)
        write(fd, bytes(data).replace(b"\n", b"\r\n"))
        return len(data)

    def linked(source: Any, target: Any, **options: Any) -> None:
        if options:
            raise NotImplementedError("src_dir_fd and dst_dir_fd unavailable on this platform")
        link(source, target)

    def renamed(source: Any, target: Any) -> None:
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "File exists", source, None, target)
        _refuse_open(source)
        rename(source, target)

    def refusing(call: Any) -> Any:
        def called(*paths: Any, **options: Any) -> Any:
            for path in paths:
                _refuse_open(path)
            return call(*paths, **options)

        return called

    for name, call in {
        "open": opened,
        "write": written,
        "link": linked,
        "rename": renamed,
        "replace": refusing(os.replace),
        "unlink": refusing(os.unlink),
        "remove": refusing(os.remove),
    }.items():
        monkeypatch.setattr(os, name, call)


def _refuse_open(path: Any) -> None:
    """Files that are open can neither be renamed, nor replaced, nor removed."""
    if not os.path.exists(path):
        return
    for fd in os.listdir("/proc/self/fd"):
        try:
            same = os.path.samefile(f"/proc/self/fd/{fd}", path)
        except OSError:
            continue
        if same:
            raise PermissionError(errno.EACCES, "The process cannot access the file", path)
