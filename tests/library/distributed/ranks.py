"""Runs cases on several ranks and collects their errors."""

import json
import os
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from library.distributed.training import Case, Trainer, cases, compare
from processes import Child, free_port

PATIENCE = 240
KINDS = {2: ("ddp", "fsdp"), 4: ("ddp", "fsdp", "hsdp")}


def run_ranks(folder: Path, world: int, target: Callable[..., Any], *args: Any) -> None:
    """Run a function on `world` ranks, and check that no case failed on any of them."""
    env = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    folders = [folder / f"rank{rank}of{world}" for rank in range(world)]
    children = [Child(rank_folder, target, *args, **env, RANK=str(rank)) for rank, rank_folder in enumerate(folders)]
    for child in children:
        child.process.join(PATIENCE)
    for child, rank_folder in zip(children, folders, strict=True):
        ended = child.ended()
        assert ended.status == 0, ended.err
        bad = {name: error for name, error in json.loads((rank_folder / "errors.json").read_text()).items() if error}
        assert not bad, f"{rank_folder.name}: {', '.join(bad)}\n\n{next(iter(bad.values()))}"


def run_cases(runs: dict[str, Callable[[], None]]) -> None:
    """Run each case with the other ranks, and write the errors to a file."""
    dist.init_process_group("gloo")
    errors = {}
    for name, run in runs.items():
        try:
            run()
            errors[name] = ""
        except Exception:
            errors[name] = traceback.format_exc()
    Path("errors.json").write_text(json.dumps(errors))
    dist.barrier()
    dist.destroy_process_group()


def every_case(few: bool) -> None:
    """Compare every case with one process that sees the whole batch; with few=True each importance and pull once."""
    planned = cases(KINDS[int(os.environ["WORLD_SIZE"])], few=few)
    alone = cache(lambda *what: Trainer(Case("one", *what)).start().finish())
    for case in planned:
        alone(*case.what)  # before the process group exists
    run_cases({str(case): partial(_equals, case, alone(*case.what)) for case in planned})


def _equals(case: Case, expected: dict[str, Any]) -> None:
    compare(Trainer(case).start().finish(), expected)
