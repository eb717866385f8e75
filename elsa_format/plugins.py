"""What converters, kinds of checkpoint and commands of other packages are built of.

These names are as public as those of `elsa_format` itself; its modules with an underscore are not.
"""

from elsa_format._choose import LevelChoice, choose_level
from elsa_format._container import SNIFFED, TensorInfo, as_array, other_format
from elsa_format._container.dtypes import DTYPES, Dtype, of_array
from elsa_format._container.index import is_index, is_url
from elsa_format._container.json import dump, is_text
from elsa_format._counters import mask_into
from elsa_format._deprecated import commit_outputs
from elsa_format._digest import digest_of_lines, tensor_line
from elsa_format._directory import weights_file
from elsa_format._evaluate import direction, show_level
from elsa_format._level_reader import LevelReader, counted
from elsa_format._memory import BLOCK, Arena
from elsa_format._metrics import BETTER
from elsa_format._network import Network, PlannedTensor, open_network
from elsa_format._options import renamed
from elsa_format._output import Output, Target, Transaction, is_special, open_output
from elsa_format._packing import Checkpoint, open_checkpoint
from elsa_format._packing.calibration import Calibration, CalibrationOptions, SolvedTensor
from elsa_format._profile import LevelLike, LevelNumber, find_level, variant_name
from elsa_format._shared_writer import Exchange, SharedWriter, Together, alone, open_shared_writer
from elsa_format._storage import Source
from elsa_format._threads import Meter, Progress, no_progress, tell
from elsa_format._verify import digest_lines
from elsa_format._writer import Contents

__all__ = [
    "BETTER",
    "BLOCK",
    "DTYPES",
    "SNIFFED",
    "Arena",
    "Calibration",
    "CalibrationOptions",
    "Checkpoint",
    "Contents",
    "Dtype",
    "Exchange",
    "LevelChoice",
    "LevelLike",
    "LevelNumber",
    "LevelReader",
    "Meter",
    "Network",
    "Output",
    "PlannedTensor",
    "Progress",
    "SharedWriter",
    "SolvedTensor",
    "Source",
    "Target",
    "TensorInfo",
    "Together",
    "Transaction",
    "alone",
    "as_array",
    "choose_level",
    "commit_outputs",
    "counted",
    "digest_lines",
    "digest_of_lines",
    "direction",
    "dump",
    "find_level",
    "is_index",
    "is_special",
    "is_text",
    "is_url",
    "mask_into",
    "no_progress",
    "of_array",
    "open_checkpoint",
    "open_network",
    "open_output",
    "open_shared_writer",
    "other_format",
    "show_level",
    "tell",
    "tensor_line",
    "variant_name",
    "weights_file",
]


def __getattr__(name: str) -> object:
    if name == "Step":
        renamed("plugins.Step", "PlannedTensor")
        return PlannedTensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
