"""What the converters use of elsa_format beyond its public names, in one place."""

from elsa_format._blocks import (
    BlockReader,
    OpenSource,
    Progress,
    Source,
    as_array,
    ignore,
    open_source,
    read_profile,
)
from elsa_format._choose import choose_level
from elsa_format._dtypes import DTYPES, Dtype, of_array
from elsa_format._header import Header, TensorInfo, read_header
from elsa_format._json import dump, is_text
from elsa_format._layouts import mask_of
from elsa_format._memory import BLOCK, Arena
from elsa_format._output import (
    AtomicFile,
    Output,
    Target,
    commit_together,
    is_special,
    open_output,
)
from elsa_format._plan import Step, plain_names, plan
from elsa_format._profile import LevelLike, LevelNumber, Profile, find_level, variant_name
from elsa_format._storage import is_url

__all__ = [
    "BLOCK",
    "DTYPES",
    "Arena",
    "AtomicFile",
    "BlockReader",
    "Dtype",
    "Header",
    "LevelLike",
    "LevelNumber",
    "OpenSource",
    "Output",
    "Profile",
    "Progress",
    "Source",
    "Step",
    "Target",
    "TensorInfo",
    "as_array",
    "choose_level",
    "commit_together",
    "dump",
    "find_level",
    "ignore",
    "is_special",
    "is_text",
    "is_url",
    "mask_of",
    "of_array",
    "open_output",
    "open_source",
    "plain_names",
    "plan",
    "read_header",
    "read_profile",
    "variant_name",
]
