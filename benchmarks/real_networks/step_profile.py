"""Where the time of a plain training step goes."""

import time
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from real_networks.problem import Problem
from real_networks.run import Run

STEPS = 20
LINES = 25


def profile_steps(problem: Problem) -> str:
    """Return the mean time of some steps, and the operations that take most of the profiled ones."""
    cuda = problem.new_train[0].device.type == "cuda"
    problem.steps = STEPS
    run = Run(problem, 0)
    run.train()  # kernels are loaded
    seconds = -time.perf_counter()
    run.train()
    seconds += time.perf_counter()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        run.train()
    averages: Any = profiler.key_averages()
    table = averages.table(sort_by="cuda_time_total" if cuda else "cpu_time_total", row_limit=LINES)
    memory = f", {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if cuda else ""
    return f"{1e3 * seconds / STEPS:.1f} ms for a step{memory}\n{table}"
