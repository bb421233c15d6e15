"""What one of several processes does: many cases one after the other, and a file that says how each ended."""

import json
import os
import socket
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from distributed.training import Case, Trainer, cases, compare
from processes import Child

PATIENCE = 240
KINDS = {2: ("ddp", "fsdp"), 4: ("ddp", "fsdp", "hsdp")}


def started(folder: Path, world: int, target: Callable[..., Any], *args: Any) -> None:
    """Run a function on so many ranks; every case that it tried must have gone well on each."""
    env = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    folders = [folder / f"rank{rank}of{world}" for rank in range(world)]
    children = [Child(each, target, *args, **env, RANK=str(rank)) for rank, each in enumerate(folders)]
    for child in children:
        child.process.join(PATIENCE)
    for child, each in zip(children, folders, strict=True):
        ended = child.ended()
        assert ended.status == 0, ended.err
        bad = {name: said for name, said in json.loads((each / "found.json").read_text()).items() if said}
        assert not bad, f"{each.name}: {', '.join(bad)}\n\n{next(iter(bad.values()))}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def tried(runs: dict[str, Callable[[], None]]) -> None:
    """Run each, together with the other ranks, and say what went wrong."""
    dist.init_process_group("gloo")
    found = {}
    for name, run in runs.items():
        try:
            run()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    Path("found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def every_case(few: bool) -> None:
    """Each importance with each pull, or each of both with one, against one process that sees the whole batch."""
    planned = cases(KINDS[int(os.environ["WORLD_SIZE"])], few=few)
    alone = cache(lambda *what: Trainer(Case("one", *what)).start().finish())
    for case in planned:
        alone(*case.what)  # before there are ranks to count
    tried({str(case): partial(_equals, case, alone(*case.what)) for case in planned})


def _equals(case: Case, expected: dict[str, Any]) -> None:
    compare(Trainer(case).start().finish(), expected)
