"""Runs of each rule in one go and in two, for test_resume and test_eight_devices."""

import math

from click.testing import CliRunner
from conftest import TINY
from internals import Checkpoints, train

import elsa_format
from elsa_train import Scope, parse_levels

SHORT = {**TINY, "levels": "90", "epochs": 0.2, "densify_epochs": 0, "mask_every": 2}
WORDS = ["digits", "--plot", "none", "--checkpoint-every", "5", "-q", "--train-images", "448"]
WORDS += [x for key, value in SHORT.items() for x in (f"--{key.replace('_', '-')}", str(value))]


def run_and_resume(folder, rules, *few):
    """Run the command with each rule in one go; in two, stopped when the mask has changed twice."""
    save, found = Checkpoints.save, {}

    def stop(self, progress, phase=None):
        save(self, progress, phase)
        if progress.done == 0 and phase and phase.step == 5:
            raise KeyboardInterrupt

    try:
        for rule in rules:
            codes = []
            for way, saving in (("whole", save), ("two", stop), ("two", save)):
                Checkpoints.save = saving
                words = [*WORDS, *few, "--sparsify", rule, "-o", str(folder / f"{rule}-{way}")]
                codes.append(CliRunner().invoke(train, words).exit_code)
            found[rule] = codes
    finally:
        Checkpoints.save = save
    return found


def check_resumed(folder, found):
    """Both ways give the same bytes, the level has its budget, and no two rules the same level."""
    (level,), digests = parse_levels("90"), set()
    for rule, codes in found.items():
        assert codes == [0, 130, 0], rule
        whole, two = (folder / f"{rule}-{way}/seed-0/model.safetensors" for way in ("whole", "two"))
        assert whole.read_bytes() == two.read_bytes(), rule
        # The run has compared the level's digest with that of its freeze.
        elsa_format.verify(whole)
        with elsa_format.open(whole) as file:
            kernels = [name for name in file.nested if Scope().matches(name)]
            size = sum(math.prod(file.tensors[name].shape) for name in kernels)
            assert sum(file.nested[n][0] for n in kernels) == round(float(level.density) * size)
            digests.add(file.levels[0].digest)
    assert len(digests) == len(found)
