"""Sixty-four fleets of tiny runs at once on two cores, for minutes: none is lost, and the driver does not grow."""

import os
import time
from pathlib import Path

import pytest
import torch

from laboratory.cluster import cluster, needs_ray, workers
from laboratory.faults.small import uninterrupted
from laboratory.mooring_command import command
from laboratory.test_kill import rows, saved
from processes import Child

pytestmark = pytest.mark.faults

FLEETS = 64
SECONDS = 120
"""So long all of them are to be under way at once."""

PATIENCE = 900

MEGABYTES = 50
"""How much the driver may grow while they are."""

STEP = 0.25
"""Seconds that a step takes at the least once all have begun, on a machine of any speed."""

EPOCHS = 22
"""Of four tasks of six steps each: longer than that by themselves."""

FOLDER = "MOORING_TEST_CROWD"
"""The variable, which workers see too, that says where each of them leaves a file when it begins."""


class Waiting(torch.nn.Module):
    """On a worker waits until all have begun, and from then on a little in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and "RAY_JOB_ID" in os.environ:
            folder, end = Path(os.environ[FOLDER]), time.monotonic() + PATIENCE
            (folder / str(os.getpid())).touch()
            while len(os.listdir(folder)) < FLEETS and time.monotonic() < end:
                time.sleep(STEP)
            time.sleep(STEP)
        return x


def waiting(shape: tuple[int, int, int]) -> torch.nn.Module:
    """A tiny network for long runs."""
    layers = torch.nn.Linear(shape[1] * shape[2], 9), torch.nn.Tanh()
    return torch.nn.Sequential(Waiting(), torch.nn.Flatten(), *layers)


def megabytes(process: int) -> float:
    """What a process holds now."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


@needs_ray
def test_sixty_four_fleets_at_once_lose_nothing_and_the_drivers_memory_stays_flat(tmp_path, fault_table, monkeypatch):
    (tmp_path / "begun").mkdir()
    monkeypatch.setenv(FOLDER, str(tmp_path / "begun"))
    asked = ["compare", "--methods", "plain,explicit-mas", "--seeds", str(FLEETS // 2), "--limit", "30", "--tasks", "4"]
    asked += [
        "--batch",
        "5",
        "--epochs",
        str(EPOCHS),
        "--dtype",
        "float64",
        "--network",
        "laboratory.faults.test_crowd:waiting",
    ]
    asked += ["--study", "study.sqlite"]
    whole = uninterrupted(tmp_path / "whole", asked)
    full: list[tuple[float, float]] = []
    with cluster(2) as ray_cluster:
        ray = ["--engine", "ray", "--address", ray_cluster.address, "--fleet", "1", "--share", str(2 / FLEETS)]
        child = Child(tmp_path / "crowd", command, *asked, *ray, patience=PATIENCE, RAY_AUTH_MODE="disabled")
        while child.running():
            if sum(len(workers(node, b"ray::_run_remote_job")) for node in ray_cluster.nodes) == FLEETS:
                full.append((time.monotonic(), megabytes(child.process.pid)))
            time.sleep(1)
        ended = child.ended()
    assert ended.status == 0, ended.err
    assert "lost" not in ended.err
    assert ended.err.startswith(f"{FLEETS} runs to train in {FLEETS} fleets\n")
    assert saved(tmp_path / "crowd") == []
    fault_table.add(f"{FLEETS} fleets at once (Ray)", FLEETS, whole, rows(tmp_path / "crowd"))
    seconds, memory = full[-1][0] - full[0][0], [size for _, size in full]
    fault_table.note(
        f"{FLEETS} at once for {seconds:.0f} s; the driver held {memory[0]:.0f} MB, at most {max(memory):.0f} MB"
    )
    assert seconds >= SECONDS
    assert max(memory) - memory[0] < MEGABYTES
