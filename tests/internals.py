"""The private names that tests, fuzz targets and benchmarks use, each from where it is now.

Only this file knows in which modules they are: `from internals import LevelReader, _http` works
after either moves. Modules begin with an underscore. Nothing is imported before it is asked for,
so that a test of the core needs neither jax nor onnx. A process of its own, which does not have
this file, gets the import as text: `import_line("main")`.
"""

from importlib import import_module
from typing import Any

MODULES = {
    "_bench_command": "elsa_converters._bench",
    "_calibrated_pack": "elsa_converters.calibrate._pack",
    "_export_command": "elsa_converters._cli",
    "_converters_errors": "elsa_converters._errors",
    "_bench": "elsa_converters.onnx._run.bench",
    "_onnx_evaluate": "elsa_converters.onnx._run.evaluate",
    "_export": "elsa_converters.onnx._write.export",
    "_fast": "elsa_converters.onnx._fast.pick",
    "_latency": "elsa_converters.onnx._run.latency",
    "_measure": "elsa_converters.onnx._fast.timing",
    "_session": "elsa_converters.onnx._run.session",
    "_writer": "elsa_converters.onnx._model.write",
    "_fast_layers": "elsa_converters.torch._fast.layers",
    "_fast_levels": "elsa_converters.torch._fast.levels",
    "_fast_packed": "elsa_converters.torch._fast.packed",
    "_fast_sparsify": "elsa_converters.torch._fast.sparsify",
    "_torch_levels": "elsa_converters.torch._levels",
    "_extract_command": "elsa_format._cli.extract",
    "_pack_command": "elsa_format._cli.pack",
    "_header": "elsa_format._container",
    "_json": "elsa_format._container.json",
    "_blocks": "elsa_format._delivery.blocks",
    "_copy": "elsa_format._delivery.copy",
    "_document": "elsa_format._delivery",
    "_prefix": "elsa_format._delivery",
    "_delivery_pure": "elsa_format._delivery.pure",
    "_errors": "elsa_format._errors",
    "_file": "elsa_format._file",
    "_installed": "elsa_format._installed",
    "_kernels": "elsa_format._kernels",
    "_memory": "elsa_format._memory",
    "_destination": "elsa_format._destination",
    "_manifest": "elsa_format._directory.manifest",
    "_directory": "elsa_format._destination",
    "_atomic": "elsa_format._output.atomic",
    "_pack": "elsa_format._packing.pack",
    "_profile": "elsa_format._profile",
    "_progress": "elsa_format._progress",
    "_pure": "elsa_format._pure",
    "_start": "elsa_format._start",
    "_storage": "elsa_format._storage",
    "_http": "elsa_format._storage.http",
    "_http_client": "elsa_format._storage.http_client",
    "_places": "elsa_format._storage.shards",
    "_survey": "elsa_format._survey",
    "_threads": "elsa_format._threads",
    "_train_errors": "elsa_train._errors",
    "_hosts": "elsa_train._sharded.hosts",
    "_loop": "elsa_train._loop",
    "_method": "elsa_train._method",
    "_ranking": "elsa_train._sharded.ranking",
    "_report": "elsa_train._report",
    "_run": "elsa_train._run",
    "_selection": "elsa_train._selection",
    "_sparsify": "elsa_train._sparsify",
    "_wide": "elsa_train._sharded.wide",
}

# What each module gives; AS what is called otherwise there.
NAMES = {
    "elsa_converters._bench": "bench show_bench",
    "elsa_converters._cli": "export",
    "elsa_converters._errors": "TemplateMismatch UnsupportedOnnx",
    "elsa_converters.calibrate._layer": "Settings curve solve_layer",
    "elsa_converters.calibrate._masks": "admm counters_of inverse_of largest",
    "elsa_converters.calibrate._outputs": "Answers Compared Reference",
    "elsa_converters.calibrate._problem": "state",
    "elsa_converters.calibrate._shares": "FLOOR GRID Curve by_cost by_magnitude uniform",
    "elsa_converters.calibrate._statistics": "Collector apply mixed",
    "elsa_converters.calibrate._sweep": "HELD Sweep spread",
    "elsa_converters.calibrate._values": "best_scales refit solve_alone solve_together",
    "elsa_converters.calibrate._work": "Work",
    "elsa_converters.onnx._fast.pick": "fastest_layers",
    "elsa_converters.onnx._fast.rewrite": "prepare use_sparse",
    "elsa_converters.onnx._graph.simplify": "fold_batch_norm",
    "elsa_converters.onnx._fast.layers": "Layer",
    "elsa_converters.onnx._fast.timing": "example_inputs",
    "elsa_converters.onnx._run.bench": "mark_best",
    "elsa_converters.onnx._fast.functions": "FIRST_OPSET function",
    "elsa_converters.sparse._weights": "to_csr to_pattern",
    "elsa_format._cli": "main",
    "elsa_format._cli.extract": "extract_command",
    "elsa_format._cli.inspect": "inspect_command",
    "elsa_format._container.dtypes": "DTYPES Dtype of_array",
    "elsa_format._container": "MAX_HEADER check_size lay_out parse read_header serialize",
    "elsa_format._delivery.blocks": "at_once",
    "elsa_format._delivery.codec": "decode_nested encode_nested",
    "elsa_format._delivery": "DELIVERY_BLOCK header_bytes",
    "elsa_format._layouts": "LAYOUT_NAMES LayoutName",
    "elsa_format._level_header": "estimated_downloads",
    "elsa_format._level_reader": "LevelReader",
    "elsa_format._memory": "ARENA LARGE LINE MEMORY_BLOCK Arena give_block take_block",
    "elsa_format._network": "open_network",
    "elsa_format._output": "Transaction open_output",
    "elsa_format._output.atomic": "AtomicFile",
    "elsa_format._packing.calibration": "open_calibration",
    "elsa_format._packing": "ArrayCheckpoint",
    "elsa_format._packing.layers": "empty_layers input_axes layer_kind",
    "elsa_format._packing.one_shot": "FEW find_thresholds magnitude_counters",
    "elsa_format._packing.options": "PackFields",
    "elsa_format._profile": "find_level",
    "elsa_format._progress": "Bar clock progress",
    "elsa_format._start": "find_command",
    "elsa_format._storage": "PositionedStorage fill",
    "elsa_format._storage.fsspec": "FsspecStorage",
    "elsa_format._storage.local": "FileStorage",
    "elsa_format._threads": "Meter Stopped run start",
    "elsa_format._writer": "Contents open_writer",
    "elsa_format.levels": "_most_kept",
    "elsa_train._calibrate.layers": "find_head find_layers",
    "elsa_train._calibrate.program": "trace",
    "elsa_train._calibrate.variables": "tensors_of",
    "elsa_train._cli": "train train_main",
    "elsa_train._errors": (
        "BadData BadRecipe FrozenWeightChanged InfeasibleTraining InvalidRecipe MissedBudget "
        "MissingData NonFiniteLoss NotReproduced TrainError UnknownModel"
    ),
    "elsa_train._folder": "Checkpoints Output Row _record load_network replacing",
    "elsa_train._jaxpruner": "JaxprunerRule load_jaxpruner make_updater",
    "elsa_train._levels": "DENSE check_levels check_sparsity usual_shares",
    "elsa_train._loop": "Carry Report Trainer _sparsity make_optimizer",
    "elsa_train._method": "count_nonzero sparse",
    "elsa_train._multilevel": "check_level without_state",
    "elsa_train._plan": "Plan",
    "elsa_train._recipe": "ACCURACY CHOICES FIELDS LOSS Measure make_recipe recipe_names",
    "elsa_train._report": "Reporter cells markdown mean_std read_curves show_report",
    "elsa_train._rules": "RULES",
    "elsa_train._run": "Run run_seed train_run",
    "elsa_train._selection": "Whole cut_by_bits cut_by_tables rank_whole",
    "elsa_train._sharded.hosts": "Hosts",
    "elsa_train._sharded.wide": "whole",
    "elsa_train._sparsify": "SCORES Request _select_blocks apply_mask keep_all",
    "elsa_train._stop": "StopSignal",
    "elsa_train._tensorboard": "TensorBoard scalars",
    "elsa_train._tree": "flatten size unflatten",
    "elsa_train.torch._finetune": "FinetuneRun",
    "elsa_train.torch._bits": "embed flush words_of",
    "elsa_train.torch._select": "FROZEN keys select select_blocks",
}
AS = {
    "DELIVERY_BLOCK": "BLOCK",
    "FinetuneRun": "_Run",
    "MEMORY_BLOCK": "BLOCK",
    "extract_command": "command",
    "inspect_command": "command",
    "show_bench": "show",
    "show_report": "show",
    "train_main": "main",
    "train_run": "train",
}
_HOMES = {name: module for module, names in NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name in MODULES:
        return import_module(MODULES[name])
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), AS.get(name, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def import_line(name: str) -> str:
    """The statement by which a script that another process runs imports `name`."""
    if name in MODULES:
        return f"import {MODULES[name]} as {name}"
    return f"from {_HOMES[name]} import {AS.get(name, name)} as {name}"
