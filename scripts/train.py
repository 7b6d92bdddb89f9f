"""Train a small CNN on two data sets of a running daemon, and say how long it waited for data.

    scripts/train.py --train mnist-train --test mnist-test --job lr-0.002 --lr 0.002

Needs a daemon that serves both (scripts/demo starts one). Exits with 1 where the accuracy stays under --min-accuracy.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dataserve.client import ServedDataset
from dataserve.protocol.errors import DataserveError

TEST_BATCH_SIZE = 1000
CLASSES = 10

#: MNIST's own, on the 0 to 1 scale; near enough for any grey digits.
NORMALIZE = ((0.1307,), (0.3081,))


@dataclass
class Meter:
    """Where a loop's time went: `waited_s` of `total_s` in `next()`."""

    samples: int = 0
    waited_s: float = 0.0
    total_s: float = 0.0

    def over(self, batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches as images and labels, timed."""
        began = time.perf_counter()
        iterator = iter(batches)
        asked = began
        for batch in iterator:
            self.waited_s += time.perf_counter() - asked
            images, labels = image_and_label(batch)
            self.samples += len(labels)
            yield images, labels
            asked = time.perf_counter()
        # The last `next()` only says that the epoch is over, but it is a wait too.
        ended = time.perf_counter()
        self.waited_s += ended - asked
        self.total_s += ended - began


def image_and_label(batch: Any) -> tuple[Tensor, Tensor]:
    """A torchvision data set yields pairs, arrays of an `.npz` yield a dict with the file's names."""
    if isinstance(batch, dict):
        return batch["image"], batch["label"]
    images, labels = batch
    return images, labels


def small_cnn(images: Tensor) -> nn.Module:
    """Two strided convolutions and a linear layer: quick on one core. Sizes come from a first batch, `B x C x H x W`."""
    layers = [
        nn.Conv2d(images.shape[1], 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
    ]
    features = nn.Sequential(*layers)
    with torch.no_grad():
        width = features(images[:1]).shape[1]
    return nn.Sequential(features, nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> float:
    """One epoch; returns the mean loss of its batches."""
    model.train()
    losses = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


@torch.no_grad()
def accuracy(model: nn.Module, test: ServedDataset) -> float:
    """The share of the test set's rows, each seen once, that the model names right."""
    model.eval()
    right = rows = 0
    for batch in test:
        images, labels = image_and_label(batch)
        right += int((model(images).argmax(1) == labels).sum())
        rows += len(labels)
    return right / rows


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train and test; returns what is reported."""
    torch.set_num_threads(1)  # several jobs share this machine
    torch.manual_seed(args.seed)
    train = ServedDataset(
        args.train, batch_size=args.batch_size, job=args.job, seed=args.seed, last="drop", normalize=NORMALIZE
    )
    test = ServedDataset(
        args.test, batch_size=TEST_BATCH_SIZE, job=args.job, shuffle=False, last="short", normalize=NORMALIZE
    )
    images, _ = image_and_label(next(iter(test)))
    model = small_cnn(images)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    meter = Meter()
    for epoch in range(args.epochs):
        loss = train_epoch(model, optimizer, meter.over(train))
        if (epoch + 1) % max(1, args.epochs // 5) == 0:
            print(f"[{args.job}] epoch {epoch + 1} of {args.epochs}: loss {loss:.4f}", flush=True)
    return {
        "job": args.job,
        "seed": args.seed,
        "lr": args.lr,
        "epochs": args.epochs,
        "accuracy": accuracy(model, test),
        "samples_per_s": meter.samples / meter.total_s,
        "wait_share": meter.waited_s / meter.total_s,
    }


def parse(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Train a small CNN on digits that a dataserve daemon serves.")
    parser.add_argument("--train", required=True, metavar="NAME", help="the data set to train on")
    parser.add_argument("--test", required=True, metavar="NAME", help="the data set to test on")
    parser.add_argument("--job", required=True, help="this run's name at the daemon")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of rows")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """The exit status."""
    args = parse(argv)
    try:
        result = run(args)
    except DataserveError as error:
        print(f"[{args.job}] {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(
        f"[{args.job}] {result['accuracy']:.2%} of the test digits right, {result['samples_per_s']:,.0f} samples/s, "
        f"waited for data {result['wait_share']:.1%} of the time",
        flush=True,
    )
    if args.json:
        args.json.write_text(json.dumps(result) + "\n")
    if result["accuracy"] < args.min_accuracy:
        print(f"[{args.job}] {args.min_accuracy:.0%} were asked for.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
