"""Errors of the trainer.

TrainError(ElsaError)
├── BadRecipe           a value in the recipe or on the command line
├── InfeasibleTraining  a level sequence that can't be trained, said before training starts
├── BadData             data that is missing or not what its format says
├── NonFiniteLoss       the loss or a weight became Inf or NaN
├── FrozenWeightChanged a routine changed a weight that it was told is frozen
├── NotReproduced       the written file does not give back a level as it was frozen
└── Interrupted         SIGTERM: the state is saved, the same command resumes
"""

from elsa_format import ElsaError


class TrainError(ElsaError):
    """Anything that stops the trainer."""

    exit_code = 1


class BadRecipe(TrainError):
    """A value in the recipe or on the command line is not usable."""

    exit_code = 2


class InfeasibleTraining(TrainError):
    """The levels can't be nested in each other."""

    exit_code = 2


class BadData(TrainError):
    """Data is missing or not what its format says."""


class NonFiniteLoss(TrainError):
    """The loss or a weight became Inf or NaN."""


class FrozenWeightChanged(TrainError):
    """A routine changed a weight that it was told is frozen."""


class NotReproduced(TrainError):
    """The written file does not give back a level as it was frozen."""


class Interrupted(TrainError):
    """Training was asked to stop; its state is saved."""

    exit_code = 143
