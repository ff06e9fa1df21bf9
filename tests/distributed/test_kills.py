"""A rank that is killed, or that raises: the others end and say so, and a restart goes on as if nothing happened."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.kills import kills
from tests.distributed.launch import ROOT

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("way", "count", "seed"), [("fsdp", 3, 7), ("ddp", 2, 11)])
def test_a_run_whose_rank_is_killed_resumes_and_ends_exactly_as_an_undisturbed_one(
    tmp_path: Path, way: str, count: int, seed: int
) -> None:
    for told in kills(tmp_path, count=count, ranks=2, seed=seed, way=way):
        assert told["restarts"] == 1, told
        assert told["exact"], told
        assert told["sound"], told


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("end", ["killed", "raises"])
def test_the_others_end_with_a_message_where_nobody_looks_after_them(tmp_path: Path, way: str, end: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"rank": 1, "step": 4, "place": 2}
    jobs = {"end": ("saved", {"way": way, "kill": where | ({"raises": True} if end == "raises" else {})})}
    command = [sys.executable, "-m", "tests.distributed.saving", str(tmp_path), json.dumps(jobs)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **address, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        (_, first), (_, second) = (one.communicate(timeout=120) for one in running)
    finally:
        for one in running:
            one.kill()
    assert running[1].returncode == (-signal.SIGKILL if end == "killed" else 1)
    assert running[0].returncode not in (0, None)
    assert "another process does not answer" in first or "step-exception" in first
    if end == "raises":
        assert "a fault of this rank" in second
