"""A run with a fixed seed and without atheris: `python -m fuzz.short [TARGET ...]`.

Sanitizers and atheris exclude each other, so this is also how the C module is run under them; it
starts from what atheris has found, too.
"""

import argparse
import random
import sys
from collections import Counter

from fuzz.answers import mutate as mutate_answers
from fuzz.fetching import mutate as mutate_fetches
from fuzz.mutate import mutate
from fuzz.seeds import found_before, seeds
from fuzz.targets import TARGETS


def inputs(target: str, rounds: int, seed: int, start: tuple[bytes, ...] = ()) -> list[bytes]:
    """The seeds themselves, then mutations of them, and of those."""
    start += seeds(target)
    rng = random.Random(f"{target} {seed}")
    found = list(start)
    recent = list(start)
    for _ in range(rounds):
        base = rng.choice(recent if rng.random() < 0.3 else start)
        if target in ("pack", "delivery"):
            changed = base[:1] + mutate(base[1:], rng, start)
        elif target in ("kernels", "integers"):
            changed = bytes([rng.randrange(256)]) + rng.randbytes(rng.randrange(200))
        elif target == "http":
            changed = mutate_answers(base, rng, start)
        elif target == "fetch":
            changed = mutate_fetches(base, rng, start)
        else:
            changed = mutate(base, rng, start)
        found.append(changed)
        recent[rng.randrange(len(recent))] = changed
    return found


def main() -> None:
    """Run targets; print what failed, one line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), metavar="TARGET")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    failed = 0
    for target in options.targets:
        kinds: Counter[str] = Counter()
        for data in inputs(target, options.rounds, options.seed, found_before(target)):
            try:
                TARGETS[target](data)
            except Exception as error:
                kind = f"{type(error).__name__}: {str(error)[:150]}"
                if not kinds[kind]:
                    print(f"{target}: {kind} on {data[:1000]!r}", flush=True)
                kinds[kind] += 1
        failed += kinds.total()
        print(f"{target}: {options.rounds} mutations, {kinds.total()} failed", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
