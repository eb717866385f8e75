"""Measure calibrated levels of a real network, and write its tables to docs/calibrate.md.

    python -m benchmarks.calibrate ocr --draws 3

A draw is another choice of samples. Test data decides nothing. What is finished is left alone, so
that this can be stopped and started at any time.
"""

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.calibrate import RUNS
from benchmarks.calibrate.methods import METHODS, NETWORKS, TRADES, Network, Run, opened
from benchmarks.calibrate.table import ORIGINAL, Found, path_of, runs, show, write


def measure(network: Network, run: Run, data: Path | None) -> Found:
    """Nest, and test every level of what was written."""
    if run == ORIGINAL:
        return Found({"dense": network.scores(None, "dense")})
    busy = os.getloadavg()[0] > 0.5
    with tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        out = Path(folder) / "net.safetensors"
        seconds, peak = run.measured(network.name, data, out)
        names = run.levels.split(",")
        levels: dict[str, int | str] = {name: t for t, name in enumerate(names, 1)}
        if run.method != "alone":
            levels["dense"] = "dense"
        scores = {name: network.scores(out, level) for name, level in levels.items()}
    return Found(scores, seconds, peak, busy)


def main() -> None:
    """Measure what is not measured yet, and write the page after each run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calibrate", description=__doc__)
    parser.add_argument("name", choices=NETWORKS)
    parser.add_argument("--data", type=Path, help="model of ocr and minilm, images of cifar")
    parser.add_argument("--draws", type=int, default=3, help="choices of samples (3)")
    parser.add_argument("--methods", default=",".join(METHODS), help="of all: %(default)s")
    parser.add_argument("--again", action="store_true", help="measure what is finished, too")
    given = parser.parse_args()
    if unknown := set(methods := given.methods.split(",")) - {*METHODS, *TRADES}:
        parser.error(f"no method {min(unknown)!r}; there are {', '.join({**METHODS, **TRADES})}")
    network = opened(given.name, given.data)
    folder = RUNS / given.name
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [run for d in range(1, given.draws + 1) for m in methods for run in runs(m, d)]
    for run in [ORIGINAL, *wanted]:
        if path_of(folder, run).exists() and not given.again:
            continue
        found = measure(network, run, given.data)
        write(folder, run, found)
        show(network, folder, given.draws)
        for level, scores in found.scores.items():
            shown = (f"{network.measures[name].show(s.mean)} {name}" for name, s in scores.items())
            print(f"{run.method} {level}, draw {run.draw}: {', '.join(shown)}", flush=True)
        print(f"{found.seconds:.0f} s, {found.peak / 1e9:.1f} GB", flush=True)
    show(network, folder, given.draws)


if __name__ == "__main__":
    main()
