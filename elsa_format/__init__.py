"""ELSA: one checkpoint file, several fully trained sparse networks nested inside it.

>>> import elsa_format
>>> with elsa_format.open("net.safetensors") as file:
...     weights = file.load(level=2)
>>> sorted(weights)
['bias', 'layer']
"""

import sys

if sys.byteorder != "little":  # weights are masked where they lie, as the machine's own words
    from elsa_format._installed import refuse_big_endian

    refuse_big_endian()

TYPE_CHECKING = False  # as in typing, which would have to be imported
if TYPE_CHECKING:
    from elsa_format._container import TensorInfo
    from elsa_format._counters import embed_counters, mask_level, read_counters
    from elsa_format._deprecated import Delivery, open_delivery
    from elsa_format._digest import level_digest
    from elsa_format._errors import *
    from elsa_format._evaluate import evaluate
    from elsa_format._extract import extract
    from elsa_format._fetch import FetchReport, fetch
    from elsa_format._file import File, load_level, open, stream
    from elsa_format._inspect import inspect
    from elsa_format._kernels import kernels
    from elsa_format._layouts import Bitmask, Csr
    from elsa_format._metrics import Metric
    from elsa_format._packing import Checkpoint
    from elsa_format._packing.options import PackOptions
    from elsa_format._packing.pack import PackReport, pack
    from elsa_format._profile import Level, MetricInfo, Profile
    from elsa_format._record import record
    from elsa_format._ship import ShipReport, ship
    from elsa_format._verify import Report, verify
    from elsa_format._writer import LevelSpec, write

__version__ = "0.2.0"

__all__ = [
    "AlreadyPacked",
    "Bitmask",
    "BitsTooWide",
    "Checkpoint",
    "ChecksumMismatch",
    "ConflictingOptions",
    "CountMismatch",
    "CounterOutOfRange",
    "Csr",
    "Delivery",
    "DigestMismatch",
    "DuplicateKey",
    "ElsaError",
    "FetchReport",
    "File",
    "FormatError",
    "HeaderTooLarge",
    "Incomplete",
    "InfeasibleLevels",
    "InputChanged",
    "InvalidCheckpoint",
    "InvalidDelivery",
    "InvalidHeader",
    "InvalidIndex",
    "InvalidJson",
    "InvalidLayout",
    "InvalidOffsets",
    "InvalidOption",
    "InvalidProfile",
    "Level",
    "LevelSpec",
    "Metric",
    "MetricInfo",
    "MissingExtra",
    "NoGraph",
    "NoLevelGiven",
    "NoSuchLevel",
    "NoSuchTensor",
    "NonFinite",
    "NotElsa",
    "NotNested",
    "OutdatedDelivery",
    "OutputExists",
    "PackOptions",
    "PackReport",
    "Profile",
    "ProfileMismatch",
    "RemoteError",
    "Report",
    "ShipReport",
    "TensorInfo",
    "TensorMismatch",
    "TooLarge",
    "TrailingData",
    "Truncated",
    "UnknownDtype",
    "UnsafePath",
    "UnsupportedFeature",
    "UnsupportedVersion",
    "ZeroFrozen",
    "__version__",
    "embed_counters",
    "evaluate",
    "extract",
    "fetch",
    "inspect",
    "kernels",
    "level_digest",
    "load_level",
    "mask_level",
    "open",
    "open_delivery",
    "pack",
    "read_counters",
    "record",
    "ship",
    "stream",
    "verify",
    "write",
]


_NAMES = {
    "_container": "TensorInfo",
    "_counters": "embed_counters mask_level read_counters",
    "_deprecated": "Delivery open_delivery",
    "_digest": "level_digest",
    "_evaluate": "evaluate",
    "_extract": "extract",
    "_fetch": "FetchReport fetch",
    "_file": "File load_level open stream",
    "_inspect": "inspect",
    "_kernels": "kernels",
    "_layouts": "Bitmask Csr",
    "_metrics": "Metric",
    "_packing": "Checkpoint",
    "_packing.options": "PackOptions",
    "_packing.pack": "PackReport pack",
    "_profile": "Level MetricInfo Profile",
    "_record": "record",
    "_ship": "ShipReport ship",
    "_verify": "Report verify",
    "_writer": "LevelSpec write",
}
"""What each module gives; all else are errors."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:

    def __getattr__(name):
        # Imported when it is used: commands hear Ctrl-C before numpy, which takes long, is there.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f"elsa_format.{_HOMES.get(name, '_errors')}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
