"""Learn to read handwritten digits with ``gpuctl.Trainer``.

The data are scikit-learn's 1,797 real digits of 8 x 8 pixels, which ship in its wheel. Runs the same with

    python digits.py
    torchrun --nproc-per-node 2 digits.py
    gpuctl train digits.py

and when nodes come and go, learns the same. What it has learned is evaluated in plain PyTorch by

    gpuctl ckpt pull last pulled
    python digits.py --eval pulled
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gpuctl import Trainer, log_metrics


def main() -> None:
    options = parsed()
    train, test = data(options.seed)
    if options.eval:
        print(f"accuracy={evaluated(Path(options.eval), test):.4f}")
        return
    torch.manual_seed(options.seed)
    model = network(options.width)
    trainer = Trainer(
        model,
        nn.CrossEntropyLoss(label_smoothing=0.05),
        torch.optim.AdamW(model.parameters(), options.lr, weight_decay=0.01),
        train,
        global_batch=options.batch,
        steps=options.steps,
        seed=options.seed,
        checkpoint_every=options.checkpoint_every,
        checkpoints=options.checkpoints,
    )
    fitted = trainer.fit()
    accuracy = trainer.evaluate(test, correct)
    log_metrics(fitted.steps, accuracy=accuracy)
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    if options.out:
        torch.save(model.state_dict(), options.out)
    print(f"accuracy={accuracy:.4f}")


def evaluated(folder: Path, test: TensorDataset) -> float:
    """Accuracy of a model that was pulled into ``folder``."""
    if not (folder / "model.pt").is_file():
        raise SystemExit(f"there is no model.pt in {folder}: gpuctl ckpt pull last {folder}")
    weights = torch.load(folder / "model.pt", weights_only=True)
    model = network(width=len(weights["0.weight"]))
    model.load_state_dict(weights)
    model.eval()
    images, labels = test.tensors
    with torch.no_grad():
        return correct(model(images), labels).double().mean().item()


def network(width: int) -> nn.Module:
    """A small convolutional network: 1 x 8 x 8 to 10 classes."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """(training, test): 1,437 and 360 digits, split by ``seed``."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[:360], order[360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def correct(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1) == target


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=192, help="samples per step, over all ranks")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between two checkpoints")
    parser.add_argument("--checkpoints", help="where they go outside of a gpuctl job: a folder or a bucket URL")
    parser.add_argument("--out", help="file for the final weights")
    parser.add_argument("--eval", metavar="DIR", help="train nothing: evaluate what `gpuctl ckpt pull` put there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
