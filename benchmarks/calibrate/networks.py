"""Train the dense networks that calibration is measured on: a CIFAR-10 ResNet and a byte GPT.

    python -m benchmarks.calibrate.networks cifar --data cifar-10-batches-bin
    python -m benchmarks.calibrate.networks gpt

docs/results.md says where the images come from; the text is the documentation that comes with
Python. Each writes runs/calibrate/NAME.pt, which `python -m benchmarks.calibrate NAME` reads.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention

from benchmarks.calibrate import RUNS
from elsa_train.data import Data, load


class Residual(nn.Module):
    """Two convolutions with batch norm beside a way around them, at half the resolution."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        self.way = nn.Sequential(
            nn.Conv2d(before, width, 3, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.around = nn.Sequential(
            nn.Conv2d(before, width, 1, 2, bias=False), nn.BatchNorm2d(width)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.way(x) + self.around(x))


class ResNet(nn.Sequential):
    """Images of 32 x 32 to logits of ten classes."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            Residual(width, 2 * width),
            Residual(2 * width, 4 * width),
            Residual(4 * width, 8 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )


class Block(nn.Module):
    """Causal attention, then two layers with GELU, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes to logits of the bytes after them."""

    def __init__(self, width: int = 128, layers: int = 4, context: int = 128) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def images(data: Data, indices: np.ndarray, split: str = "train") -> tuple[Tensor, Tensor]:
    """Normalised images, channels first, and their labels."""
    found, labels = data.batch(split, indices, 0)
    found = (found - np.float32(data.mean)) / np.float32(data.std)
    return torch.from_numpy(found).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels).long()


def shifted(x: Tensor, random: np.random.Generator) -> Tensor:
    """A batch moved by up to four pixels, and mirrored or not: each image for itself."""
    size = x.shape[-1]
    windows = pad(x, (4, 4, 4, 4)).unfold(2, size, 1).unfold(3, size, 1)
    down, right = torch.from_numpy(random.integers(0, 9, (2, len(x))))
    x = windows[torch.arange(len(x)), :, down, right]
    mirrored = torch.from_numpy(random.random(len(x)) < 0.5)[:, None, None, None]
    return torch.where(mirrored, x.flip(3), x)


def cifar_batches(data: Data, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of images to train on."""
    random = np.random.default_rng(seed)
    for _ in range(epochs):
        order = random.permutation(data.size("train"))
        for indices in np.split(order[: len(order) // 250 * 250], len(order) // 250):
            x, y = images(data, indices)
            yield shifted(x, random), y


def gpt_batches(data: Data, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows of the text to train on."""
    random = np.random.default_rng(seed)
    for epoch in range(epochs):
        order = random.permutation(data.size("train"))
        for indices in np.split(order[: len(order) // 16 * 16], len(order) // 16):
            x, y = data.batch("train", indices, seed * 1000 + epoch)
            yield torch.from_numpy(x).long(), torch.from_numpy(y).long()


def train(model: nn.Module, batches: list | Iterator, steps: int, rate: float) -> None:
    """Adam with a rate that rises over a tenth of the steps, then falls to nothing."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
    model.train()
    for step, (x, y) in enumerate(batches, 1):
        loss = cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            print(f"{step} of {steps} steps: loss {loss.item():.3f}", flush=True)
    model.eval()


def trained(name: str, model: nn.Module) -> nn.Module:
    """The model with the weights that `main` wrote."""
    path = RUNS / f"{name}.pt"
    if not path.is_file():
        raise SystemExit(
            f"{path} does not exist: run python -m benchmarks.calibrate.networks {name}"
        )
    model.load_state_dict(torch.load(path))
    return model.eval()


def main() -> None:
    """Train one and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("cifar", "gpt"))
    parser.add_argument("--data", default="cifar-10-batches-bin", help="folder of the images")
    parser.add_argument("--epochs", type=int, help="cifar: 8, gpt: 2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, help=f"{RUNS}/NAME.pt")
    given = parser.parse_args()
    out = given.out or RUNS / f"{given.name}.pt"
    if out.exists():
        raise SystemExit(f"{out} exists already; remove it to train anew")
    torch.manual_seed(given.seed)
    if given.name == "cifar":
        data, model, epochs, rate = load("cifar10", given.data), ResNet(), given.epochs or 8, 4e-3
        batches, size = cifar_batches(data, epochs, given.seed), 250
    else:
        data, model, epochs, rate = load("text"), GPT(), given.epochs or 2, 6e-3
        batches, size = gpt_batches(data, epochs, given.seed), 16
    train(model, batches, epochs * (data.size("train") // size), rate)
    out.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), out)
    print(f"{out}: written")


if __name__ == "__main__":
    main()
