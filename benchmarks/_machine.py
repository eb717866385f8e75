"""Where and with what the table was made."""

import datetime
import importlib.metadata
import os
import platform
import sys
from pathlib import Path

from internals import _kernels

import elsa_format

PACKAGES = (
    "numpy",
    "xxhash",
    "safetensors",
    "ml_dtypes",
    "torch",
    "compressed-tensors",
    "onnx",
    "onnxruntime",
    "jax",
)


def describe() -> list[str]:
    """Lines that say what the numbers depend on."""
    kernels = "C kernels" if _kernels.NATIVE else "numpy kernels"
    return [
        f"{_cpu()}, {os.cpu_count()} cores, {_memory():.0f} GiB memory, "
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}, elsa-format {elsa_format.__version__} ({kernels}), "
        + ", ".join(f"{name} {version}" for name, version in _versions()),
        f"`python -m benchmarks {' '.join(sys.argv[1:])}".rstrip() + "`, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, load average before the run "
        f"{os.getloadavg()[0]:.1f}",
    ]


def _versions() -> list[tuple[str, str]]:
    found = []
    for name in PACKAGES:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
