"""Rules and joint training over eight devices, by the command and in a loop of one's own."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import environment
from eight_worker import LEVELS
from resumed import check_resumed

import elsa_format
from elsa_train import parse_levels

WORKER = Path(__file__).with_name("eight_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eight")


@pytest.fixture(scope="module")
def eight(folder):
    run = subprocess.run(
        [sys.executable, WORKER, folder],
        env=environment(8),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("scope", LEVELS)
def test_data_parallel_runs_write_the_counters_they_end_with(eight, folder, scope):
    run = eight["runs"][scope]
    assert run["code"] == 0, run
    assert (run["devices"], run["same"]) == (8, True)
    path = folder / scope / "seed-0" / "model.safetensors"
    elsa_format.verify(path)
    pruned = {"global": "kernel$"}.get(scope, "conv.*kernel$")
    with elsa_format.open(path) as file:
        shapes = {name: file.tensors[name].shape for name in file.nested if re.search(pruned, name)}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    for t, level in enumerate(parse_levels(LEVELS[scope])):
        kept = {name: run["kept"][name][t] for name in sizes}
        if scope == "global":
            assert sum(kept.values()) == round(float(level.density) * sum(sizes.values()))
        else:
            assert kept == {n: round(float(level.density) * size) for n, size in sizes.items()}


def test_a_resumed_run_gives_the_same_bytes(eight, folder):
    assert eight["in two"] == [130, 0]
    one, two = (folder / name / "seed-0" / "model.safetensors" for name in ("global", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_resumed_run_of_levels_one_by_one_does_too(eight, folder):
    check_resumed(folder, eight["rules"])


@pytest.mark.parametrize("scope", LEVELS)
def test_split_parameters_end_with_the_levels_of_unsplit_ones(eight, scope):
    found = eight["split"][scope]
    assert [same for same, _ in found.values()] == [True, True]
    assert found["rows"] == found["none"]
