"""Writes checkpoints half-way and resumes from those of any number of ranks."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from library.distributed.ranks import run_cases
from library.distributed.training import FACTORED, IMPORTANCES, PULLS, Case, Trainer, compare

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def kept(kinds: tuple[str, ...]) -> list[Case]:
    """Return each importance once with FSDP, with alternating pulls and a budget, and a few cases with DDP."""
    names = list(PULLS)
    pairs = [(i, names[(2 * place) % len(names)]) for place, i in enumerate(IMPORTANCES)]
    cases = [Case(kind, i, p) for kind in kinds for i, p in (pairs[:3] if kind == "ddp" else pairs)]
    cases += [Case("fsdp", "ewc", "penalty", adam=True)] * ("fsdp" in kinds)
    cases += [Case("fsdp", "mas", "interpolation", memory="8bit")] * ("fsdp" in kinds)
    return cases + [Case("ddp", FACTORED, "budget")] * ("ddp" in kinds)


def folder_of(folder: Path, case: Case) -> Path:
    return folder / str(case).replace(" ", "_")


def write_checkpoints(folder: Path) -> None:
    """Write a checkpoint of each case on two ranks, which resume the bf16 cases themselves."""
    half = [("ewc", "interpolation"), ("mas", "penalty"), ("si", "proximal"), ("per sample", "budget")]
    runs = {f"write {case}": partial(_write, folder, case) for case in kept(("ddp", "fsdp"))}
    run_cases(runs | {f"bf16 {i} {p}": partial(_resumes_in_bf16, folder / "bf16", Case("fsdp", i, p)) for i, p in half})


def _write(folder: Path, case: Case) -> None:
    Trainer(case).start().save(folder_of(folder, case))


def _resumes_in_bf16(folder: Path, case: Case) -> None:
    how: dict[str, Any] = {"policy": BF16, "dtype": torch.float32}
    first = Trainer(case, **how).start()
    first.save(folder_of(folder, case))
    expected = first.finish()
    resumed = Trainer(case, folder_of(folder, case), **how).finish()
    for name, tensor in expected["tensors"].items():
        assert tensor.isfinite().all()
        assert torch.equal(*(getattr(t, "_local_tensor", t) for t in (tensor, resumed["tensors"][name]))), name


def gone_on(two: Path, one: Path) -> None:
    """Resume on four ranks from checkpoints of two ranks and of one, and from a state pickled by one."""
    alone = cache(lambda *what: Trainer(Case("one", *what)).start().finish())
    cases = kept(("ddp", "fsdp"))
    for case in cases:
        alone(*case.what)
    runs = {}
    for case in cases:
        expected = alone(*case.what)
        runs[f"2 -> 4 {case}"] = partial(_goes_on, case, folder_of(two, case), expected)
    for case in (*kept(("fsdp",))[1:5], *kept(("hsdp",))[3:6]):
        expected = alone(*case.what)
        like = Case("fsdp", case.importance, case.pull)
        runs[f"1 -> 4 {case}"] = partial(_goes_on, case, folder_of(one, like), expected)
    run_cases(runs)


def _goes_on(case: Case, folder: Path, expected: dict[str, Any]) -> None:
    trainer = Trainer(case, folder)
    if (whole := folder / "mooring.pt").exists():
        trainer.moor.load_state_dict(torch.load(whole))
    compare(trainer.finish(), expected)
