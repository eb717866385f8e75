"""Errors of the trainer, each with the exit code of docs/limits.md.

TrainError(ElsaError)      anything else that stops it (1)
├── BadRecipe              a value on the command line, or given from Python (2)
│   └── InvalidRecipe      a recipe file (3)
├── InfeasibleTraining     a level sequence that can't be trained, said before training starts (2)
├── BadData                data that is not what its format or the protocol says (3)
│   └── MissingData        data that is not there (1)
├── UnknownModel           an ELSA file that does not say which bundled model it holds (3)
├── InvalidRun             a file in a run's folder that no run has written (3)
├── NonFiniteLoss          the loss or a weight became Inf or NaN (1)
├── MissedBudget           a level has not the number of weights it was to have (1)
├── FrozenWeightChanged    a routine changed a weight that it was told is frozen (1)
├── NotReproduced          the written file does not give back a level as it was frozen (1)
└── Interrupted            SIGTERM: the state is saved, the same command resumes (143)
    └── Cancelled          Ctrl-C: the same (130)
"""

from elsa_format import ElsaError


class TrainError(ElsaError):
    """Anything that stops the trainer."""

    exit_code = 1


class BadRecipe(TrainError):
    """A value on the command line, or given from Python, is not usable."""

    exit_code = 2


class InvalidRecipe(BadRecipe):
    """A recipe file is not a recipe."""

    exit_code = 3


class InfeasibleTraining(TrainError):
    """The levels can't be nested in each other."""

    exit_code = 2


class BadData(TrainError):
    """Data is not what its format or the protocol says."""

    exit_code = 3


class MissingData(BadData):
    """Data is not there."""

    exit_code = 1


class UnknownModel(TrainError):
    """An ELSA file does not say which bundled model it holds."""

    exit_code = 3


class InvalidRun(TrainError):
    """A file in a run's folder is cut, or none that a run has written."""

    exit_code = 3


class NonFiniteLoss(TrainError):
    """The loss or a weight became Inf or NaN."""


class MissedBudget(TrainError):
    """A level has not the number of weights it was to have."""


class FrozenWeightChanged(TrainError):
    """A routine changed a weight that it was told is frozen."""


class NotReproduced(TrainError):
    """The written file does not give back a level as it was frozen."""


class Interrupted(TrainError):
    """Training was asked to stop; its state is saved."""

    exit_code = 143


class Cancelled(Interrupted):
    """Training was asked to stop by Ctrl-C."""

    exit_code = 130
