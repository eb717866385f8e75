"""What converters, kinds of checkpoint and commands of other packages are built of.

These names are as public as those of `elsa_format` itself; its modules with an underscore are not.
"""

from elsa_format._choose import choose_level
from elsa_format._container.arrays import as_array
from elsa_format._container.dtypes import DTYPES, Dtype, of_array
from elsa_format._container.header import TensorInfo
from elsa_format._container.index import is_url
from elsa_format._container.json import dump, is_text
from elsa_format._level_reader import LevelReader
from elsa_format._memory import BLOCK, Arena
from elsa_format._network import Network, Step
from elsa_format._open import open_network
from elsa_format._output import Output, Target, commit_outputs, is_special, open_output
from elsa_format._packing.checkpoint import Checkpoint
from elsa_format._profile import LevelLike, LevelNumber, find_level, variant_name
from elsa_format._storage import Source
from elsa_format._storage.directory import weights_file
from elsa_format._threads import Meter, Progress, no_progress

__all__ = [
    "BLOCK",
    "DTYPES",
    "Arena",
    "Checkpoint",
    "Dtype",
    "LevelLike",
    "LevelNumber",
    "LevelReader",
    "Meter",
    "Network",
    "Output",
    "Progress",
    "Source",
    "Step",
    "Target",
    "TensorInfo",
    "as_array",
    "choose_level",
    "commit_outputs",
    "dump",
    "find_level",
    "is_special",
    "is_text",
    "is_url",
    "no_progress",
    "of_array",
    "open_network",
    "open_output",
    "variant_name",
    "weights_file",
]
