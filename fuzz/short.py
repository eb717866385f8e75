"""A short run with a fixed seed, without atheris: `python -m fuzz.short [ROUNDS] [SEED]`."""

import random
import sys
from collections import Counter

from fuzz.mutate import mutate
from fuzz.seeds import seeds
from fuzz.targets import TARGETS


def inputs(target: str, rounds: int, seed: int) -> list[bytes]:
    """The seeds themselves, then mutations of them, and of those."""
    start = seeds(target)
    rng = random.Random(f"{target} {seed}")
    found = list(start)
    recent = list(start)
    for _ in range(rounds):
        base = rng.choice(recent if rng.random() < 0.3 else start)
        if target == "pack":
            changed = base[:1] + mutate(base[1:], rng, start)
        elif target == "kernels":
            changed = bytes([rng.randrange(256)]) + rng.randbytes(rng.randrange(200))
        else:
            changed = mutate(base, rng, start)
        found.append(changed)
        recent[rng.randrange(len(recent))] = changed
    return found


def main() -> None:
    """Run all targets; print what failed, one line for each kind."""
    rounds, seed = (int(n) for n in (*sys.argv[1:], "1000", "0")[:2])
    for target, check in TARGETS.items():
        kinds: Counter[str] = Counter()
        for data in inputs(target, rounds, seed):
            try:
                check(data)
            except Exception as error:
                kind = f"{type(error).__name__}: {str(error)[:150]}"
                if not kinds[kind]:
                    print(target, kind, data[:2000] if len(sys.argv) > 3 else "", flush=True)
                kinds[kind] += 1
        print(f"{target}: {rounds} rounds, {sum(kinds.values())} failed", flush=True)


if __name__ == "__main__":
    main()
