"""elsa-bench: what each level costs on this machine, what it is worth, and which are best."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from elsa_converters._cli import DIM, THREADS, find_onnx, show_axes
from elsa_format import Metric, MissingExtra
from elsa_format.cli import (
    FORCE,
    JSON,
    PRINTED,
    QUIET,
    SETTINGS,
    VERSION,
    answer,
    columns,
    needs_extra,
    progress,
    reports_errors,
    say,
    show_size,
    table,
    wrap,
)

Metrics = Mapping[Any, Mapping[str, Metric]]


class FunctionType(click.ParamType):  # type: ignore[type-arg]
    """A function of a module that Python finds, or that is here: module:function."""

    name = "module:function"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if callable(value):
            return value
        import sys
        from importlib import import_module

        module, _, name = value.partition(":")
        if not module or not name.isidentifier():
            self.fail(f"{value!r} is not a module and a function, such as scores:f1", param, ctx)
        sys.path.insert(0, "")  # where the command runs, as with `python -m`
        try:
            found = getattr(import_module(module), name, None)
        except Exception as error:  # whatever a module does that is imported
            self.fail(f"{value!r} cannot be imported: {error}", param, ctx)
        if not callable(found):
            self.fail(f"{value!r}: module {module!r} has no function {name!r}", param, ctx)
        return found


def _in_transformers(words: Sequence[str]) -> bool:
    """Whether a model directory is to be measured, without a graph."""
    from os.path import isdir

    named = [word.partition("=")[0] for word in words]
    return "--onnx" not in named and any(isdir(word) for word in words)


@needs_extra(
    "onnx", "this command", ["onnx", "onnxruntime"], free=["--text"], unless=_in_transformers
)
@click.command("bench", context_settings=SETTINGS)
@click.argument("source", metavar="SRC", type=click.Path())
@click.option(
    "--onnx",
    "template",
    metavar="TEMPLATE",
    type=click.Path(dir_okay=False),
    help="The graph: a template, or any ONNX model with the same weights.",
)
@click.option(
    "--data",
    metavar="NPZ",
    type=click.Path(dir_okay=False),
    help="Measure metrics on these arrays: the graph's inputs by name, and labels or targets.",
)
@click.option(
    "--text",
    metavar="TXT",
    type=click.Path(dir_okay=False),
    help="Without --onnx: measure the perplexity of this text in transformers.",
)
@click.option(
    "--evaluate",
    "function",
    type=FunctionType(),
    help="With --data: compute metrics of outputs and arrays with this function.",
)
@click.option(
    "--limit", metavar="N", type=click.IntRange(1), help="Use the first N samples, or parts of TXT."
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=32,
    help="With --data: samples in one run.  [default: 32]",
)
@click.option(
    "--no-time", is_flag=True, help="With --data: measure metrics only, neither time nor memory."
)
@click.option(
    "--record",
    "recorded",
    is_flag=True,
    help="With --data or --text: record the metrics in SRC, which a new file replaces.",
)
@THREADS
@DIM
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(["16", "8"]),
    help="Also with integers of so many bits: time, and metrics with --data.",
)
@click.option(
    "--metric", help="The metric to compare levels by.  [default: accuracy, or the first of --data]"
)
@click.option(
    "--seconds", type=click.FloatRange(0), default=2.0, help="For each level.  [default: 2]"
)
@click.option(
    "--html",
    "target",
    metavar="OUT",
    type=click.Path(dir_okay=False),
    help="Write the page of elsa-inspect, with these measurements.",
)
@PRINTED
@FORCE
@JSON
@QUIET
@VERSION
@reports_errors
def bench(
    source: str,
    template: str | None,
    data: str | None,
    text: str | None,
    function: Any,
    limit: int | None,
    batch: int,
    no_time: bool,
    recorded: bool,
    threads: int | None,
    sizes: tuple[tuple[str, int], ...],
    precisions: tuple[str, ...],
    metric: str | None,
    seconds: float,
    target: str | None,
    printed: str,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure every level of an ELSA file on this machine: time, memory, and metrics on your data.

    Without --onnx, SRC is the directory of a causal language model: tokens in a second, the time to
    read 128 tokens, and memory, in transformers.

    SRC may be a model directory, a shard index, a delivery file or its beginning as well: then the
    levels that are there are measured.

    \b
    elsa-bench net.safetensors --onnx net.onnx --threads 1
    elsa-bench net.safetensors --onnx net.onnx --data validation.npz
    elsa-bench net.safetensors --onnx net.onnx --dim batch=8 --json
    elsa-bench net.safetensors --onnx net.onnx --html report.html
    elsa-bench net.safetensors --onnx net.onnx --data validation.npz --no-time --record
    elsa-bench net.safetensors --onnx net.onnx --data validation.npz --precision 16 --precision 8
    elsa-bench model/ --threads 1
    elsa-bench model/ --text held-out.txt
    """
    if force and printed == "-" and target is None:
        raise click.UsageError("--force goes with --html and --output.")
    if template is None and text is None and _in_transformers([source]):
        if data is not None or target is not None or recorded or limit is not None or sizes:
            raise click.UsageError(
                "--data, --html, --dim, --limit and --record go with --onnx or --text."
            )
        speeds = _measure_speed(source, threads, seconds, quiet)
        answer(_show_speeds(speeds, columns(printed), as_json), printed, force=force)
        return
    if (template is None) == (text is None):
        raise click.UsageError("Give --onnx TEMPLATE, or --text for a model of transformers.")
    if data is None and function is not None:
        raise click.UsageError("--evaluate goes with --data.")
    if no_time and (data is None or target is not None):
        raise click.UsageError("--no-time goes with --data, and without --html.")
    if precisions and (no_time or text is not None):
        raise click.UsageError("--precision goes with --onnx, and without --no-time.")
    if data is None and text is None and (limit is not None or recorded):
        name = "--record" if recorded else "--limit"
        raise click.UsageError(f"{name} goes with --data or --text.")
    if text is not None and (data is not None or target is not None):
        raise click.UsageError("--data and --html go with --onnx.")
    width = columns(printed)
    recording = _recording(source, template) if recorded else None
    if text is not None:
        metrics = _measure_text(source, text, limit, quiet)
        if recording is not None:
            recording.write(metrics)
        answer(_show_metrics(source, metrics, width, as_json), printed, force=force)
        return
    assert template is not None
    onnx = find_onnx()
    measured = None
    integers: dict[int, Any] = {int(bits): {} for bits in precisions}
    if data is not None:
        onnx.measured_axes(template, dict(sizes))  # a wrong one, before the long work
        evaluate = partial(
            onnx.evaluate,
            source,
            template,
            data,
            function=function,
            limit=limit,
            batch=batch,
            threads=threads,
        )
        with progress("evaluating", quiet=quiet, unit="samples") as shown:
            measured = evaluate(progress=shown)
        if recording is not None:
            recording.write(measured)
        if no_time:
            answer(_show_metrics(source, measured, width, as_json), printed, force=force)
            return
        for bits in integers:
            with progress(f"evaluating {bits} bits", quiet=quiet, unit="samples") as shown:
                integers[bits] = evaluate(precision=bits, progress=shown)
        names = [name for found in measured.values() for name in found]
        metric = metric or ("accuracy" if "accuracy" in names else names[0])
    rows = onnx.measure_levels(
        source,
        template,
        metric=metric or "accuracy",
        threads=threads,
        sizes=dict(sizes),
        seconds=seconds,
        metrics=measured,
        integers=integers,
        progress=(lambda what: None)
        if quiet
        else (lambda what: say(f"measuring {what}", err=True)),
    )
    plain = [row.as_dict() for row in rows]
    if target is not None:
        from elsa_report import write_report  # takes long to import

        write_report(source, target, measured=plain, force=force)
    shown_rows = json.dumps(plain, indent=2) if as_json else show(rows, metric or "accuracy", width)
    answer(shown_rows, printed, force=force)


def _recording(source: str, template: str | None) -> Any:
    from elsa_converters._recording import Recording  # takes long to import

    return Recording(source, template)


def show(rows: Any, metric: str, width: int | None = None) -> str:
    """The rows as a table; a level that no other beats has a star."""
    # On a narrow terminal the last columns are left out.
    names = list(rows[0].metrics)
    if metric in names or not names:  # the one by which levels are compared first
        names = [metric, *(name for name in names if name != metric)]
    precise = sorted({bits for row in rows for bits in row.integers}, reverse=True)
    known = [bits for bits in precise if any(_metric(row, bits, metric) for row in rows)]
    lines = [
        ["level", "", "sparsity", "dense", "fast"]
        + [f"{bits} bits" for bits in precise]
        + [*names, *(f"{metric}, {bits} bits" for bits in known), "size", "download", "memory"]
    ]
    for row in rows:
        values = [show_metric(row.metrics[name]) if name in row.metrics else "" for name in names]
        if not row.metrics:
            values[0] = "" if row.quality is None else f"{row.quality:.6g}"
        lines.append(
            [
                str(row.level),
                "*" if row.best else "",
                "-" if row.sparsity is None else f"{row.sparsity:.2%}",
                f"{row.dense_seconds * 1e3:.4g} ms",
                "-" if row.fast_seconds is None else f"{row.fast_seconds * 1e3:.4g} ms",
                *(
                    f"{row.integers[bits].seconds * 1e3:.4g} ms" if bits in row.integers else "-"
                    for bits in precise
                ),
                *values,
                *(_metric(row, bits, metric) or "-" for bits in known),
                show_size(row.size),
                "-" if row.download is None else show_size(row.download),
                "-" if row.memory is None else show_size(row.memory),
            ]
        )
    notes = [f"* No other level is at least as good in {metric} and time, and better in one."]
    if not any(row.best for row in rows):
        notes = [f"No level records {metric}; --metric names another metric."]
    if any(found.worse for row in rows for found in row.integers.values()):
        notes.append(f"! With integers {metric} is worse by more than 1 % of it.")
    notes += note_errors([row.metrics for row in rows])
    if rows[0].axes:
        notes.append(show_axes(rows[0].axes))
    if any(row.fast_seconds is None for row in rows):
        notes.append("The sparse operators were not built, for want of a C compiler.")
    text = wrap("\n".join(notes), width)
    return f"{table(lines, left=2, width=width)}\n\n{text}"


def _metric(row: Any, bits: int, metric: str) -> str:
    """What a level is worth with integers of so many bits; with a mark if that is too little."""
    found = row.integers.get(bits)
    if found is None or metric not in found.metrics:
        return ""
    return show_metric(found.metrics[metric]) + (" !" if found.worse else "")


def show_metric(metric: Metric) -> str:
    """A value and its standard error, of which two digits tell enough.

    >>> from elsa_format import Metric
    >>> show_metric(Metric(0.93712, "higher", 1000, 0.00768)), show_metric(Metric(5, "lower"))
    ('0.9371 ± 0.0077', '5')
    """
    if metric.error is None:
        return f"{metric.value:.4g}"
    if metric.error < 1e-6:
        return f"{metric.value:.6g} ± {metric.error:.2g}"
    digits = max(1 - int(f"{metric.error:.1e}".partition("e")[2]), 0)
    return f"{metric.value:.{digits}f} ± {metric.error:.{digits}f}"


def note_errors(rows: Sequence[Mapping[str, Metric]]) -> list[str]:
    """What ± means, if it is in the table."""
    samples = {m.samples for row in rows for m in row.values() if m.error is not None}
    return [f"± is the standard error of {samples.pop()} samples."] if len(samples) == 1 else []


def _measure_text(source: str, text: str, limit: int | None, quiet: bool) -> Metrics:
    """The metrics of a text."""
    try:
        from transformers.utils.logging import disable_progress_bar

        from elsa_converters.transformers import evaluate_text
    except ImportError as error:
        raise MissingExtra.of(error, "measuring with a text", "transformers") from None
    disable_progress_bar()  # of loading, which comes before ours
    with progress("evaluating", quiet=quiet, unit="parts") as shown:
        return evaluate_text(source, text, limit=limit, progress=shown)


def _measure_speed(source: str, threads: int | None, seconds: float, quiet: bool) -> Any:
    """How fast each level generates."""
    try:
        from transformers.utils.logging import disable_progress_bar

        from elsa_converters.transformers._speed import measure_speed
    except ImportError as error:
        raise MissingExtra.of(error, "measuring a model directory", "transformers") from None
    disable_progress_bar()

    def shown(what: str) -> None:
        if not quiet:
            say(f"measuring {what}", err=True)

    return measure_speed(source, threads=threads, seconds=seconds, progress=shown)


def _show_speeds(rows: Any, width: int | None, as_json: bool) -> str:
    """The rows as a table or as JSON; what is dense is left of what is fast."""
    if as_json:
        return json.dumps([row.as_dict() for row in rows], indent=2)
    lines = [["level", "sparsity", "tokens/s", "fast", "prefill", "fast", "memory", "fast"]]
    for row in rows:
        cells = [str(row.level), f"{row.sparsity:.2%}"]
        pairs = [
            [
                f"{pace.tokens:.4g}",
                f"{pace.prefill * 1e3:.4g} ms",
                show_size(pace.memory),
            ]
            if pace is not None
            else ["-"] * 3
            for pace in (row.dense, row.fast)
        ]
        lines.append([*cells, *(cell for pair in zip(*pairs, strict=True) for cell in pair)])
    most = max(row.layers[0] for row in rows)
    notes = f"fast: without the zeros of up to {most} of {rows[0].layers[1]} layers."
    return f"{table(lines, width=width)}\n\n{wrap(notes, width)}"


def _show_metrics(source: str, found: Metrics, width: int | None, as_json: bool) -> str:
    """Metrics alone, as a table or as JSON, with what the file says of the levels."""
    from elsa_format.plugins import counted, open_network  # takes long to import

    rows: list[dict[str, Any]] = []
    with open_network(source) as network:
        for level, metrics in found.items():
            name = "" if level == "dense" else network.profile.level(level).name
            sparsity = counted(network).sparsity(level)
            rows.append({"level": level, "name": name, "sparsity": sparsity, "metrics": metrics})
    if as_json:
        return json.dumps(rows, indent=2, default=asdict)
    lines = [["level", "sparsity", *rows[0]["metrics"]]]
    for row in rows:
        values = [show_metric(metric) for metric in row["metrics"].values()]
        lines.append([str(row["level"]), f"{row['sparsity']:.2%}", *values])
    notes = note_errors([row["metrics"] for row in rows])
    return "\n\n".join([table(lines, width=width), *(wrap(note, width) for note in notes)])
