"""Train sparse networks nested in one dense network, and write them as an ELSA file.

>>> import jax
>>> from elsa_train import Network, Pruner, Schedule, Scope, multi_level, parse_levels, write_file
>>> def sparsify(network, counters, level):  # one-shot; a real one trains before and after
...     kept = Pruner(Scope(), level, Schedule(0, 0, 1)).mask(network.params, None, counters, 0)
...     return Network(jax.tree.map(lambda p, k: p * k, network.params, kept))
>>> def densify(network, counters, level):  # a real one trains what is not frozen
...     again = lambda n, old, new: jax.numpy.where(n == 0, old, new)
...     return Network(jax.tree.map(again, counters, params, network.params))
>>> params = {"layer": {"kernel": jax.random.normal(jax.random.key(0), (100, 100))}}
>>> result = multi_level(Network(params), parse_levels("95,90,80"), sparsify, densify)
>>> [level.nonzero for level in result.levels]
[500, 1000, 2000]
>>> write_file("model.safetensors", result)
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elsa_train import data, models
    from elsa_train._calibrate import calibrate
    from elsa_train._calibrate.variables import restore
    from elsa_train._file import check_target, load, load_counters, write_file
    from elsa_train._jaxpruner import jaxpruner_rules
    from elsa_train._joint import Joint, divergence, masked, nest
    from elsa_train._levels import Level, Schedule, parse_levels
    from elsa_train._method import apply_updates, counters, freeze_updates, keep_frozen, revive
    from elsa_train._multilevel import FrozenLevel, Network, Progress, Result, multi_level
    from elsa_train._recalibrate import recalibrate
    from elsa_train._recipe import Recipe, read_recipe
    from elsa_train._rules import ACDC, Pruner, RigL
    from elsa_train._sparsify import Scope, apply_mask, keep_all

__all__ = [
    "ACDC",
    "FrozenLevel",
    "Joint",
    "Level",
    "Network",
    "Progress",
    "Pruner",
    "Recipe",
    "Result",
    "RigL",
    "Schedule",
    "Scope",
    "apply_mask",
    "apply_updates",
    "calibrate",
    "check_target",
    "counters",
    "data",
    "divergence",
    "freeze_updates",
    "jaxpruner_rules",
    "keep_all",
    "keep_frozen",
    "load",
    "load_counters",
    "masked",
    "models",
    "multi_level",
    "nest",
    "parse_levels",
    "read_recipe",
    "recalibrate",
    "restore",
    "revive",
    "write_file",
]

_HOME = {
    "_calibrate": ("calibrate",),
    "_calibrate.variables": ("restore",),
    "_file": (
        "check_target",
        "load",
        "load_counters",
        "write_file",
    ),
    "_jaxpruner": ("jaxpruner_rules",),
    "_joint": (
        "Joint",
        "divergence",
        "masked",
        "nest",
    ),
    "_levels": (
        "Level",
        "Schedule",
        "parse_levels",
    ),
    "_method": (
        "apply_updates",
        "counters",
        "freeze_updates",
        "keep_frozen",
        "revive",
    ),
    "_multilevel": (
        "FrozenLevel",
        "Network",
        "Progress",
        "Result",
        "multi_level",
    ),
    "_recalibrate": ("recalibrate",),
    "_recipe": (
        "Recipe",
        "read_recipe",
    ),
    "_rules": (
        "ACDC",
        "Pruner",
        "RigL",
    ),
    "_sparsify": (
        "Scope",
        "apply_mask",
        "keep_all",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
_FORMER = {
    "Densify": ("_multilevel", "a function, which `multi_level` calls"),
    "JaxprunerRule": ("_jaxpruner", "jaxpruner_rules"),
    "Sparsify": ("_multilevel", "a function, which `multi_level` calls"),
    "check_levels": ("_levels", "Scope.check"),
    "embed": ("_method", "elsa_format.write"),
    "finish": ("_method", "multi_level"),
    "freeze": ("_method", "multi_level"),
    "learnable": ("_method", "counters == 0"),
    "no_densify": ("_multilevel", "the default of `multi_level`"),
    "sparse": ("_method", "masked"),
}
"""Names of earlier releases, kept for one more: where they are, and what takes their place."""


def __getattr__(name: str) -> Any:
    # Loaded when used: `elsa-train --help` must not wait for JAX.
    if name in _MODULE_OF:
        return getattr(import_module(f"elsa_train.{_MODULE_OF[name]}"), name)
    if name in ("data", "models"):
        return import_module(f"elsa_train.{name}")
    if name in _FORMER:
        module, now = _FORMER[name]
        text = f"elsa_train.{name} is now {now}"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(import_module(f"elsa_train.{module}"), name)
    raise AttributeError(f"module 'elsa_train' has no attribute {name!r}")
