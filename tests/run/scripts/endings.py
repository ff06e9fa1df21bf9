"""Trains, and then ends in the way that its argument names."""

import atexit
import os
import signal
import sys

import torch
from task import batches, ending
from torch import nn

how = sys.argv[1]
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
atexit.register(lambda: print("at exit:", how))
signal.signal(signal.SIGINT, signal.default_int_handler)  # started in the background, it would be ignored
if how == "terminated":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(40 + number))


def train():
    for i, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if i == 26:
            leave()


def leave():
    ending(model)
    sys.stdout.flush()
    if how == "code":
        sys.exit(3)
    if how == "text":
        raise SystemExit("the end, as text")
    if how == "error":
        try:
            {}["missing"]
        except KeyError as error:
            raise ValueError("wrong value") from error
    if how == "assertion":
        assert model is None, "not None"
    if how == "_exit":
        os._exit(5)
    if how in ("interrupted", "terminated"):
        os.kill(os.getpid(), signal.SIGINT if how == "interrupted" else signal.SIGTERM)
    if how == "caught":
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted; saving")
            torch.save(model.state_dict(), "last.pt")
            sys.exit(130)
    if how == "nested":
        raise ExceptionGroup("two", [ValueError("one"), TypeError("two")])
    if how == "hook":
        sys.excepthook = lambda kind, error, trace: print("my own hook:", kind.__name__, error, file=sys.stderr)
        raise RuntimeError("for the hook")


if __name__ == "__main__":
    train()
