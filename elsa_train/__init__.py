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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elsa_train import data, models
    from elsa_train._calibrate import calibrate
    from elsa_train._calibrate_variables import restore
    from elsa_train._file import check_target, write_file
    from elsa_train._jaxpruner import JaxprunerRule, jaxpruner_rules
    from elsa_train._joint import Joint, masked, nest
    from elsa_train._levels import Level, Schedule, check_levels, parse_levels
    from elsa_train._method import (
        apply_updates,
        counters,
        embed,
        finish,
        freeze,
        freeze_updates,
        learnable,
        revive,
        sparse,
    )
    from elsa_train._multilevel import (
        Densify,
        FrozenLevel,
        Network,
        Progress,
        Result,
        Sparsify,
        multi_level,
        no_densify,
    )
    from elsa_train._recalibrate import recalibrate
    from elsa_train._recipe import Recipe, read_recipe
    from elsa_train._sparsify import Pruner, Scope

__all__ = [
    "Densify",
    "FrozenLevel",
    "JaxprunerRule",
    "Joint",
    "Level",
    "Network",
    "Progress",
    "Pruner",
    "Recipe",
    "Result",
    "Schedule",
    "Scope",
    "Sparsify",
    "apply_updates",
    "calibrate",
    "check_levels",
    "check_target",
    "counters",
    "data",
    "embed",
    "finish",
    "freeze",
    "freeze_updates",
    "jaxpruner_rules",
    "learnable",
    "masked",
    "models",
    "multi_level",
    "nest",
    "no_densify",
    "parse_levels",
    "read_recipe",
    "recalibrate",
    "restore",
    "revive",
    "sparse",
    "write_file",
]

_HOME = {
    "_calibrate": ("calibrate",),
    "_calibrate_variables": ("restore",),
    "_file": ("check_target", "write_file"),
    "_jaxpruner": ("JaxprunerRule", "jaxpruner_rules"),
    "_joint": ("Joint", "masked", "nest"),
    "_levels": ("Level", "Schedule", "check_levels", "parse_levels"),
    "_method": (
        "apply_updates",
        "counters",
        "embed",
        "finish",
        "freeze",
        "freeze_updates",
        "learnable",
        "revive",
        "sparse",
    ),
    "_multilevel": (
        "Densify",
        "FrozenLevel",
        "Network",
        "Progress",
        "Result",
        "Sparsify",
        "multi_level",
        "no_densify",
    ),
    "_recalibrate": ("recalibrate",),
    "_recipe": ("Recipe", "read_recipe"),
    "_sparsify": ("Pruner", "Scope"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    # Loaded when used: `elsa-train --help` must not wait for JAX.
    if name in _MODULE_OF:
        return getattr(import_module(f"elsa_train.{_MODULE_OF[name]}"), name)
    if name in ("data", "models"):
        return import_module(f"elsa_train.{name}")
    raise AttributeError(f"module 'elsa_train' has no attribute {name!r}")
