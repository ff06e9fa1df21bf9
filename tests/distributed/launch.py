"""Starts several processes that train together, and collects what each told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 280
Jobs = dict[str, tuple[str, dict[str, Any]]]
Told = dict[str, list[dict[str, Any]]]


def torchrun(size: int, *command: str, folder: Path = ROOT, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a module or script in `size` processes; if one ends, all are started again, so many times at most."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    start += ["--max-restarts", str(restarts), "--monitor-interval", "0.2"]
    # Else a process that is started again meets the addresses of those before it (gloo in PyTorch 2.13).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(
        [*start, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def told_by(folder: Path, size: int, jobs: Jobs) -> Told:
    """Run the jobs one after the other in `size` processes; what each process told of each."""
    done = torchrun(size, "-m", "tests.distributed.worker", str(folder), json.dumps(jobs))
    assert done.returncode == 0, done.stderr
    return {name: [json.loads((folder / f"{name}-{r}.json").read_text()) for r in range(size)] for name in jobs}
