"""ELSA: one checkpoint file, several fully trained sparse networks nested inside it.

>>> import elsa_format
>>> with elsa_format.open("net.safetensors") as file:  # doctest: +SKIP
...     weights = file.load(level=2)
"""

from elsa_format._codec import embed_counters, mask_level, read_counters
from elsa_format._digest import level_digest
from elsa_format._errors import *  # noqa: F403 - the error classes are all public
from elsa_format._extract import extract
from elsa_format._header import TensorInfo
from elsa_format._layouts import Bitmask, Csr
from elsa_format._level_file import load_level
from elsa_format._profile import Level, Profile
from elsa_format._reader import File, open
from elsa_format._stream import stream
from elsa_format._verify import Report, verify
from elsa_format._writer import LevelSpec, write
