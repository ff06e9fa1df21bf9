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
    "sharded.py": """
        import sys
        from data import *
        from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, PartialState
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
        )
        accelerator = Accelerator(cpu="alone" not in sys.argv, fsdp_plugin=plugin)
        if "shard" in sys.argv:  # what it sets itself where it finds an accelerator
            for shared in (AcceleratorState._shared_state, PartialState._shared_state):
                shared["distributed_type"] = DistributedType.FSDP
            AcceleratorState._shared_state["fsdp_plugin"] = plugin
            assert accelerator.is_fsdp2
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        net, optimizer, batches = accelerator.prepare(model, optimizer, batches)
        kind = accelerator.distributed_type.value, accelerator.num_processes, type(next(net.parameters())).__name__
        print(" ".join(map(str, kind)) + "\\n", end="", flush=True)
        if "shard" in sys.argv:
            for (b,) in batches:
                accelerator.backward(loss_of(net, b))
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            ending(model)
    """,
    "trainer.py": """
        import sys
        from data import *
        from transformers import Trainer, TrainingArguments
        arguments = TrainingArguments(
            "out", fsdp=True, fsdp_config={"version": 2}, use_cpu="cpu" in sys.argv, report_to=[]
        )
        accelerator = Trainer(model, arguments, train_dataset=[]).accelerator
        net = accelerator.prepare(model)
        kind = accelerator.distributed_type.value, accelerator.num_processes, type(next(net.parameters())).__name__
        print(" ".join(map(str, kind)) + "\\n", end="", flush=True)
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
    "accelerate, FSDP2": ["torchrun", "--nproc_per_node", "2", "--master_port", "PORT", "sharded.py", "shard"],
    "lightning ddp": ["light.py", "ddp"],
    "lightning ddp_spawn": ["light.py", "ddp_spawn"],
}


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a module with words of a command line, in a folder that has all programs; PORT is a free one."""
    for name, text in {"data.py": DATA, "plain.py": PLAIN, **PROGRAMS}.items():
        (folder / name).write_text(textwrap.dedent(text))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = {"PYTHONPATH": str(Path(trimtab.__file__).parents[1]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return subprocess.run(
        [sys.executable, "-m", *(port if word == "PORT" else word for word in command)],
        cwd=folder,
        env={**os.environ, **paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize(
    "launch",
    in_ci(LAUNCHES.keys(), ["torchrun", "accelerate launch", "accelerate, FSDP2", "lightning ddp", "mp.spawn"]),
)
def test_every_process_is_guarded(tmp_path: Path, launch: str) -> None:
    if "lightning" in launch or "accelerate" in launch:
        needs("accelerate" if "accelerate" in launch else "lightning")
    done = started(tmp_path, "trimtab", "run", *LAUNCHES[launch])
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


ON_A_CPU = {
    "accelerate": ("sharded.py", "MULTI_CPU 2 Parameter"),
    "accelerate, not told it is a CPU": ("sharded.py alone", "NO 1 Parameter"),
    "transformers": ("trainer.py cpu", "MULTI_CPU 2 Parameter"),
    "transformers, not told it is a CPU": (
        "trainer.py",
        "ValueError: Using fsdp only works in distributed training.",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("asked", ON_A_CPU)
def test_on_a_cpu_the_frameworks_do_not_shard(tmp_path: Path, asked: str) -> None:
    """What the docs say of them: without an accelerator they take something else instead of FSDP2, or refuse."""
    needs(asked.split(",")[0])
    program, want = ON_A_CPU[asked]
    launch = "torch.distributed.run --nproc_per_node 2 --master_port PORT"
    done = started(tmp_path, *launch.split(), *program.split())
    heard = done.stdout + done.stderr
    assert heard.count(want) == 2, heard  # once in each process
    assert (done.returncode == 0) is ("Error" not in want)
