"""Launchers that start several processes, under `trimtab run`: every process is guarded, with the real packages."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import trimtab
from tests.integrations.frameworks.harness import needs
from tests.matrix import in_ci
from trimtab.record.reader import read_run

DATA = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(192, 8)
x[123, 2] = float("nan")
batches = DataLoader(TensorDataset(x), batch_size=8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

def loss_of(model, b):
    return (model(b) - b[:, :1]).square().mean()

def ending(model):
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    print(f"finite {finite}\\n", end="", flush=True)  # in one piece: all processes print to the same place
"""
PLAIN = """
from data import *
import os
import torch.distributed as dist

def train(rank=None):
    if rank is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    net = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for i, (b,) in enumerate(batches):
        if i % 2 == dist.get_rank():
            optimizer.zero_grad()
            loss_of(net, b).backward()
            optimizer.step()
    ending(model)
    dist.destroy_process_group()
"""
PROGRAMS = {
    "train.py": "from plain import *\ntrain()",
    "spawning.py": """
        import plain, torch
        if __name__ == "__main__":
            torch.multiprocessing.spawn(plain.train, nprocs=2)
    """,
    "accelerated.py": """
        from data import *
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        net, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        for (b,) in batches:
            accelerator.backward(loss_of(net, b))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ending(model)
    """,
    "light.py": """
        import sys
        import lightning.pytorch as pl
        from data import *

        class Module(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = model
            def training_step(self, batch, i):
                return loss_of(self.net, batch[0])
            def validation_step(self, batch, i):
                self.log("val_loss", loss_of(self.net, batch[0]), sync_dist=True)
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-2)

        if __name__ == "__main__":
            trainer = pl.Trainer(
                accelerator="cpu", devices=2, strategy=sys.argv[1], max_epochs=1, gradient_clip_val=1.0, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )
            trainer.fit(Module(), batches, DataLoader(TensorDataset(x[:32]), batch_size=8))
            ending(model)
    """,
}
LAUNCHES = {
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", "PORT", "train.py"],
    "torch.distributed.run": [
        *("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "PORT", "train.py"),
    ],
    "mp.spawn": ["spawning.py"],
    "accelerate launch": [
        *("accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "PORT", "accelerated.py"),
    ],
    "lightning ddp": ["light.py", "ddp"],
    "lightning ddp_spawn": ["light.py", "ddp_spawn"],
}


@pytest.mark.parametrize(
    "launch", in_ci(LAUNCHES.keys(), ["torchrun", "accelerate launch", "lightning ddp", "mp.spawn"])
)
def test_every_process_is_guarded(tmp_path: Path, launch: str) -> None:
    if "lightning" in launch or "accelerate" in launch:
        needs("accelerate" if "accelerate" in launch else "lightning")
    for name, text in {"data.py": DATA, "plain.py": PLAIN, **PROGRAMS}.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [port if word == "PORT" else word for word in LAUNCHES[launch]]
    paths = {"PYTHONPATH": str(Path(trimtab.__file__).parents[1]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "run", *words],
        cwd=tmp_path,
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "finite True" in done.stdout
    assert "finite False" not in done.stdout
    told = [line for line in done.stderr.splitlines() if re.match(r"trimtab: \w+.*, 12 steps", line)]
    assert len(told) == 2, done.stderr
    assert all("1 update kept out of the weights" in line for line in told)
    assert any("DATA001" in line for line in told)
    folders = sorted(path.parent for path in (tmp_path / "trimtab_runs").glob("**/run.jsonl"))
    assert [folder.name for folder in folders][1:] == ["rank-1"], "both processes are one run"
    assert [len(read_run(folder).series("loss")[0]) for folder in folders] == [12, 12]
    if "lightning" in launch:
        assert '"phase":"val"' in (folders[0] / "run.jsonl").read_text()
