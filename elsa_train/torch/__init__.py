"""Train sparse networks nested in one dense network, in any PyTorch loop; without JAX.

>>> from elsa_train.torch import Nesting, Schedule
"""

from elsa_train._levels import Schedule
from elsa_train.torch._file import FrozenLevel
from elsa_train.torch._finetune import FinetuneReport, finetune
from elsa_train.torch._nesting import Nesting, magnitude
from elsa_train.torch._options import FinetuneOptions
from elsa_train.torch._student import Student

__all__ = [
    "FinetuneOptions",
    "FinetuneReport",
    "FrozenLevel",
    "Nesting",
    "Schedule",
    "Student",
    "finetune",
    "magnitude",
]
