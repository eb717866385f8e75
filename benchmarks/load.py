"""A level into memory, against what loads the dense network, and the machine's limits."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from internals import LayoutName
from safetensors.numpy import load_file

import elsa_format as elsa
from benchmarks._files import LEVEL, Files, aligned, weights
from benchmarks._rows import Peak, Race, Unavailable, row

IMPORTS = "import sys, numpy, elsa_format; elsa_format.open"


def load(path: Path, layout: LayoutName = "dense", *, verify: bool = True) -> Any:
    """The 90 % level."""
    with elsa.open(path, verify=verify) as file:
        return file.load(LEVEL, layout)


def torch_module(name: str = "torch") -> Any:
    """A module of torch's, where it is installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed") from None


def read_into(path: Path, buffer: Any) -> Any:
    """A whole file with as few calls as the system needs."""
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as file:
        while view and (count := file.readinto(view)):
            view = view[count:]
    return buffer


@row("load a level, dense", "`safetensors.numpy.load_file`", target="≤ 0.5 ×")
def dense(files: Files) -> Race:
    """All tensors of a level."""
    path = files.elsa()
    return Race(lambda: load(path), lambda: load_file(path), files.size)


@row("load a level, dense, checksums off", "`safetensors.numpy.load_file`", target="≤ 0.5 ×")
def dense_unverified(files: Files) -> Race:
    """Without the checksums, which the peer does not have."""
    path = files.elsa()
    return Race(lambda: load(path, verify=False), lambda: load_file(path), files.size)


@row("load a level, dense, one large tensor", "`safetensors.numpy.load_file`", target="≤ 0.5 ×")
def dense_one_tensor(files: Files) -> Race:
    """Nothing to spread over threads but the tensor itself."""
    path = files.one_tensor()
    return Race(lambda: load(path), lambda: load_file(path), files.size)


@row("load a level, bitmask", "`safetensors.numpy.load_file`", target="≤ 0.3 ×")
def bitmask(files: Files) -> Race:
    """Only what the level keeps."""
    path = files.elsa()
    return Race(lambda: load(path, "bitmask"), lambda: load_file(path), files.size)


@row("load a level, CSR", "`safetensors.numpy.load_file`", target="≤ 0.3 ×")
def csr(files: Files) -> Race:
    """Only what the level keeps, ready for scipy."""
    path = files.elsa()
    return Race(lambda: load(path, "csr"), lambda: load_file(path), files.size)


@row("load a level, dense, to torch", "`safetensors.torch.load_file` + `clone`")
def torch_clone(files: Files) -> Race:
    """load_file alone maps the file and reads nothing yet."""
    torch, safe = torch_module(), torch_module("safetensors.torch")
    path = files.elsa()
    return Race(
        lambda: {k: torch.from_numpy(a) for k, a in load(path).items()},
        lambda: {k: t.clone() for k, t in safe.load_file(path).items()},
        files.size,
    )


@row("load a level, dense, to torch", "`torch.load`")
def torch_load(files: Files) -> Race:
    """The same tensors as torch stores them."""
    torch = torch_module()
    path, saved = files.elsa(), files.path("dense.pt")
    torch.save({k: torch.from_numpy(a) for k, a in load_file(path).items()}, saved)
    return Race(
        lambda: {k: torch.from_numpy(a) for k, a in load(path).items()},
        lambda: torch.load(saved, weights_only=True),
        files.size,
    )


@row("load a level, dense", "plain read into fresh memory")
def read_fresh(files: Files) -> Race:
    """The least that a load to fresh arrays can do in one thread."""
    path = files.elsa()
    size = path.stat().st_size
    return Race(lambda: load(path), lambda: read_into(path, aligned(size)), files.size)


@row("load a level, dense", "plain read into warm memory")
def read_warm(files: Files) -> Race:
    """What reading costs without new pages."""
    path = files.elsa()
    buffer = aligned(path.stat().st_size)
    buffer[:] = 0
    return Race(lambda: load(path), lambda: read_into(path, buffer), files.size)


@row("load a level, dense", "memcpy into fresh memory")
def memcpy_fresh(files: Files) -> Race:
    """The network is in memory already."""
    path, source = files.elsa(), weights(files.size)
    return Race(lambda: load(path), source.copy, files.size)


@row("load a level, dense", "memcpy into warm memory")
def memcpy_warm(files: Files) -> Race:
    """The limit of the memory."""
    path, source = files.elsa(), weights(files.size)
    target = np.zeros_like(source)
    return Race(lambda: load(path), lambda: np.copyto(target, source), files.size)


@row("load a level, CSR", "plain read into warm memory")
def csr_read(files: Files) -> Race:
    """Nearly nothing is written, so reading is the limit."""
    path = files.elsa()
    buffer = aligned(path.stat().st_size)
    buffer[:] = 0
    return Race(lambda: load(path, "csr"), lambda: read_into(path, buffer), files.size)


def load_peak(files: Files, layout: LayoutName, returned: int) -> Peak:
    """What a load takes beyond the imports."""
    program = f"level = elsa_format.open(sys.argv[1]).load({LEVEL}, {layout!r})"
    return Peak(program, (files.elsa(),), files.size, returned, beyond=IMPORTS)


@row("peak memory of a load, dense", "bytes returned", target="≤ 1.2 ×")
def dense_peak(files: Files) -> Peak:
    """As large as the network, once."""
    return load_peak(files, "dense", files.size)


@row("peak memory of a load, bitmask", "bytes returned", target="≤ 1.2 ×")
def bitmask_peak(files: Files) -> Peak:
    """A bit for every weight, and what is kept."""
    loaded = load(files.elsa(), "bitmask").values()
    returned = sum(
        a.values.nbytes + a.bitmask.nbytes for a in loaded if isinstance(a, elsa.Bitmask)
    )
    return load_peak(files, "bitmask", returned)


@row("peak memory of a load, CSR", "bytes returned", target="≤ 1.2 ×")
def csr_peak(files: Files) -> Peak:
    """An index for every kept weight."""
    loaded = load(files.elsa(), "csr").values()
    returned = sum(a.data.nbytes + a.indices.nbytes for a in loaded if isinstance(a, elsa.Csr))
    return load_peak(files, "csr", returned)


@row("peak memory of `safetensors.numpy.load_file`", "bytes returned")
def safetensors_peak(files: Files) -> Peak:
    """For comparison."""
    imports = "import sys; from safetensors.numpy import load_file"
    return Peak("x = load_file(sys.argv[1])", (files.elsa(),), files.size, files.size, imports)


@row("open and list levels and layers", "the same, of a sixteenth of the size", target="≤ 2 ×")
def inspect(files: Files) -> Race:
    """From the header alone, so the file's size does not matter."""
    large, small = files.repeated(files.size), files.repeated(files.size // 16)

    def listed(path: Path) -> Any:
        with elsa.open(path) as file:
            return [(level.name, level.nonzero) for level in file.levels], dict(file.nested)

    return Race(lambda: listed(large), lambda: listed(small), files.size)
