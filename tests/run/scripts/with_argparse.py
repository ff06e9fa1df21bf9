"""Options, a main function, BatchNorm, a scheduler, and an exit code out of main."""

import argparse
import sys

import torch
from task import batches, ending
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning_rate", "--lr", type=float, default=0.01)
    parser.add_argument("--mode", choices=["train", "test"], default="train")
    parser.add_argument("--quiet", type=lambda text: text == "true", default=False)
    args = parser.parse_args()
    print(sys.argv[1:], args)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.learning_rate, total_steps=30 * args.epochs)
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for x, y in batches(classes=3):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            total += loss.item()
        model.eval()
        print("epoch", epoch, "lr", scheduler.get_last_lr(), "mean loss", "nan" if total != total else "ok")
    ending(model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
