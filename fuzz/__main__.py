"""Run one target under atheris: `python -m fuzz TARGET [SECONDS] [libFuzzer options]`."""

import random
import resource
import sys
from pathlib import Path

import atheris  # type: ignore[import-untyped]

import elsa_format


def _import_from_source() -> None:
    """Forget elsa_format, all but its C module, so that it is imported from the source files.

    An editable installation has an importer of its own, which atheris cannot instrument.
    """
    package = elsa_format.__name__
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        if not name.endswith("._native"):
            del sys.modules[name]
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


_import_from_source()
with atheris.instrument_imports(include=["elsa_format"]):
    from fuzz.answers import mutate as mutate_answers
    from fuzz.fetching import mutate as mutate_fetches
    from fuzz.mutate import mutate
    from fuzz.seeds import HERE, seeds
    from fuzz.targets import TARGETS

MEMORY = 1 << 30
"""Bytes that one input may make us allocate, whatever it declares."""


def main() -> None:
    """Seed a corpus directory, then hand over to libFuzzer."""
    target, *options = sys.argv[1:]
    seconds = options.pop(0) if options and options[0].isdigit() else "300"
    start = seeds(target)
    corpus = HERE / ".found" / target
    corpus.mkdir(parents=True, exist_ok=True)
    for at, seed in enumerate(start):
        (corpus / f"seed-{at}").write_bytes(seed)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if target in ("kernels", "integers") or rng.random() < 0.2:
            return bytes(atheris.Mutate(data, max_size))
        if target == "pack":
            return (data[:1] + mutate(data[1:], rng, start))[:max_size]
        if target == "http":
            return mutate_answers(data, rng, start)[:max_size]
        if target == "fetch":
            return mutate_fetches(data, rng, start)[:max_size]
        return mutate(data, rng, start)[:max_size]

    if target != "kernels":  # AddressSanitizer reserves terabytes of addresses
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
    arguments = [
        sys.argv[0],
        str(corpus),
        f"-max_total_time={seconds}",
        f"-artifact_prefix={corpus.parent}/{target}-",
        *("-max_len=65536", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"),
        *options,
    ]
    atheris.Setup(arguments, TARGETS[target], custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
