"""The schedule of gradual pruning."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """When the mask changes and how sparse it is then.

    Polynomial: target * (1 - (1 - progress)^power), from step `start` to step `end`; one-shot is
    start = end. There is always an update at `end` itself, so the target is met for any `every`.

    >>> schedule = Schedule(start=0, end=100, every=30)
    >>> [step for step in range(200) if schedule.updates_at(step)]
    [30, 60, 90, 100]
    >>> schedule.first, schedule.progress(50)
    (30, 0.875)
    """

    start: int
    end: int
    every: int
    power: int = 3

    @property
    def first(self) -> int:
        """Return the first step before which the mask changes."""
        return min(self.start + self.every, self.end)

    def updates_at(self, step: int) -> bool:
        """Tell whether the mask changes before this step."""
        if step == self.end:
            return True
        return self.start < step < self.end and (step - self.start) % self.every == 0

    def progress(self, step: int) -> float:
        """Return how far the sparsity has come, 0 to 1."""
        if step >= self.end:
            return 1.0
        done = (step - self.start) / (self.end - self.start)
        return 1.0 - (1.0 - min(max(done, 0.0), 1.0)) ** self.power
