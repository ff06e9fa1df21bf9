"""Trains the five runs whose report pages are shown in the documentation, and takes their screenshots.

    python benchmarks/report_screenshots.py [--runs FOLDER] [--images docs/images] [--only nan]

Every run is real: a small model under a guard, with the fault that its name says. The pictures show the first screen
(1280 x 800) of each page, as a browser shows it, and of one of them all charts. Needs chromium and
`pip install -e ".[browser]"`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import trimtab
from trimtab.record.reader import read_run
from trimtab.report.html import write_html

WHOLE = "deep"
"""The run whose page is shown down to its heat map."""
Build = Callable[[Path], None]
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


class Attention(nn.Module):
    """Self-attention with padding, as in docs/how-to/nan.md."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        weights = scores.masked_fill(padding[:, None, :], float("-inf")).softmax(-1)
        return weights @ self.value(x)


class Classifier(nn.Module):
    """Attention, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = Attention(), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.head(self.attention(x, padding).mean(1))
        return answer


def nan_run(folder: Path) -> None:
    """One sentence of nothing but padding at step 120."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with trimtab.Guard(model, optimizer, clip=1.0, run_dir=folder) as guard:
        for step in range(200):
            x = torch.randn(16, 10, 8)
            y = (x[:, :, 0].mean(1) > 0).long()
            padding = torch.rand(16, 10) < 0.2
            if step == 120:
                padding[11] = True
            loss = nn.functional.cross_entropy(model(x, padding), y)
            loss.backward()
            guard.step(loss, batch=(x, padding, y))
            optimizer.zero_grad()


def exploding_run(folder: Path) -> None:
    """The learning rate becomes 300 times as high at step 240."""
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    target = torch.randn(16)
    with trimtab.Guard(model, optimizer, run_dir=folder) as guard:
        for step in range(400):
            if step == 240:
                optimizer.param_groups[0]["lr"] = 6.0
            x = torch.randn(64, 16)
            loss = (model(x).squeeze(1) - x @ target).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()


def healthy_run(folder: Path) -> None:
    """5,000 steps, validated every 250."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=5_000)
    centres = 1.5 * torch.randn(4, 16)
    with trimtab.Guard(model, optimizer, clip=1.0, run_dir=folder) as guard:
        for step in range(5_000):
            y = torch.randint(4, (64,))
            x = centres[y] + 2.0 * torch.randn(64, 16)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            guard.step(loss)
            schedule.step()
            optimizer.zero_grad()
            if step % 250 == 249:
                with torch.no_grad():
                    y = torch.randint(4, (512,))
                    guard.validate(nn.functional.cross_entropy(model(centres[y] + 2.0 * torch.randn(512, 16)), y))


def gan_run(folder: Path) -> None:
    """A GAN whose discriminator takes a logarithm of what may be 0."""
    g = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    d = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    opt_g = torch.optim.Adam(g.parameters(), lr=1e-3)
    opt_d = torch.optim.Adam(d.parameters(), lr=4e-3)
    model = nn.ModuleDict({"generator": g, "discriminator": d})
    with trimtab.Guard(model, {"generator": opt_g, "discriminator": opt_d}, run_dir=folder) as guard:
        for step in range(600):
            real = torch.randn(64, 2) * 0.3 + 2.0
            if step == 450:
                real[5] = 1e6
            opt_d.zero_grad()
            loss_d = -(d(real).log() + (1 - d(g(torch.randn(64, 4)).detach())).log()).mean()
            loss_d.backward()
            guard.step(loss_d, optimizer="discriminator")
            opt_g.zero_grad()
            loss_g = -d(g(torch.randn(64, 4))).clamp_min(1e-6).log().mean()
            loss_g.backward()
            guard.step(loss_g, optimizer="generator")


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.down(torch.tanh(self.up(self.norm(x))))


def deep_run(folder: Path) -> None:
    """300 layers; the weights of one block are overwritten at step 150."""
    blocks = [Block(8) for _ in range(100)]
    model = nn.Sequential(nn.Linear(8, 8), *blocks, nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trimtab.Guard(model, optimizer, run_dir=folder) as guard:
        for step in range(250):
            x = torch.randn(32, 8)
            if step == 150:
                with torch.no_grad():
                    blocks[60].down.weight.mul_(3e4)
            loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()


RUNS: dict[str, Build] = {
    "nan": nan_run,
    "exploding": exploding_run,
    "healthy": healthy_run,
    "gan": gan_run,
    "deep": deep_run,
}


def take(pages: dict[str, Path], images: Path) -> None:
    """The first screen of every page."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    images.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        for name, page in pages.items():
            tab = browser.new_page(viewport={"width": 1280, "height": 800})
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("html[data-painted-ms]", state="attached")
            tab.screenshot(path=images / f"report_{name}.png")
            if name == WHOLE:
                box = tab.locator(".heat").bounding_box()
                end = box["y"] + box["height"] + 20 if box is not None else 800
                clip = {"x": 0, "y": 0, "width": 1280, "height": end}
                tab.screenshot(path=images / "report.png", full_page=True, clip=clip)
            tab.close()
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="keep the runs here; those that are there are not trained again")
    parser.add_argument("--images", type=Path, default=Path("docs/images"))
    parser.add_argument("--only", choices=tuple(RUNS), action="append")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        parent = given.runs or Path(temporary)
        pages = {}
        for name in given.only or RUNS:
            folder = parent / name
            if not folder.exists():
                torch.manual_seed(0)
                RUNS[name](folder)
            pages[name] = write_html(read_run(folder))
            print(f"{name}: {pages[name]}, {pages[name].stat().st_size / 1e6:.2f} MB")
        take(pages, given.images)


if __name__ == "__main__":
    main()
