"""Train sparse networks nested in one dense network, in any PyTorch loop; without JAX.

>>> from elsa_train.torch import Nesting, Schedule
"""

from elsa_train._levels import Schedule
from elsa_train.torch._nesting import FrozenLevel, Nesting, magnitude

__all__ = ["FrozenLevel", "Nesting", "Schedule", "magnitude"]
