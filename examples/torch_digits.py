"""Train nested levels of a convolutional network on handwritten digits, in a loop of one's own.

pip install '.[torch]' scikit-learn
python examples/torch_digits.py
"""

import tempfile
from pathlib import Path

import torch
from elsa_converters.torch import attach
from sklearn.datasets import load_digits
from torch import nn

from elsa_train.torch import Nesting, Schedule

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
test = torch.arange(len(labels)) % 5 == 0

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 10),
)


def evaluate() -> dict[str, float]:
    """The accuracy on digits that were not trained with."""
    model.eval()
    with torch.no_grad():
        right = model(images[test]).argmax(1) == labels[test]
    return {"accuracy": float(right.float().mean())}


def train(epochs: int, rate: float) -> None:
    """A cosine of its own for each phase; so is the optimizer, which nesting is told to watch."""
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-4)
    handle = nesting.watch(optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * STEPS)
    model.train()
    for _ in range(epochs):
        for batch in torch.nonzero(~test)[:, 0][torch.randperm(int((~test).sum()))].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            schedule.step()
    handle.remove()


BATCH = 64
STEPS = -(-int((~test).sum()) // BATCH)

nesting = Nesting(model, levels="95,90,80")
train(5, rate=0.1)
for _ in nesting.levels:
    nesting.sparsify(Schedule(start=0, end=4 * STEPS, every=10))
    train(6, rate=0.1)
    nesting.freeze(evaluate)
    nesting.densify()
    train(2, rate=0.01)

path = Path(tempfile.mkdtemp()) / "digits.safetensors"
nesting.write(path, evaluate=evaluate)

# The file gives back each level as it was frozen, statistics of batch normalisation included.
with attach(model, path) as levels:
    for t, level in enumerate(levels.file.levels, 1):
        levels.use(t)
        found, frozen = evaluate()["accuracy"], level.metrics["accuracy"]
        print(f"level {level.name}: {frozen:.2%} when frozen, {found:.2%} from the file")
    levels.use("dense")
    print(f"dense: {evaluate()['accuracy']:.2%}")
