"""The methods: each makes and trains a run at a value of its dial."""

import copy
import time
import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import mooring
from mooring.rules import Kronecker
from real_networks.low_rank import add_adapters, factors_of
from real_networks.problem import Problem, loss_of, shuffled
from real_networks.run import Run

NATS = [0.03, 0.1, 0.3, 1.0]


def plain(problem: Problem, seed: int, dial: float) -> Run:
    """Fine-tune all parameters; the dial is a factor of the learning rate."""
    run = Run(problem, seed, rate=dial)
    start = time.perf_counter()
    run.train()
    if dial == 1:
        state = {name: t.clone() for name, t in run.model.state_dict().items()}
        problem.shared["plain"] = seed, state, time.perf_counter() - start
    return run


def linear_probe(problem: Problem, seed: int, dial: float) -> Run:
    """Train the last layer alone; without a new head that changes old outputs."""
    run = Run(problem, seed)
    _train_last_layer(run, dial)
    return run


def probe_then_finetune(problem: Problem, seed: int, dial: float) -> Run:
    """LP-FT: train the last layer, then all parameters; the dial is the factor of the second learning rate."""
    run = Run(problem, seed, rate=dial)
    _train_last_layer(run, problem.head_rate)
    run.train()
    return run


def _train_last_layer(run: Run, rate: float) -> None:
    """Train the last layer; if it is new, on features that are computed once, since nothing before it moves."""
    head: nn.Module = run.model.new_head if run.model.new_head is not None else run.model.old
    optimizer = run.problem.optimizer(head.parameters(), rate)
    if run.model.new_head is None:
        run.optimizer, finetuning = optimizer, run.optimizer
        run.train()
        run.optimizer = finetuning
        return
    (x, y), problem = run.problem.new_train, run.problem
    with torch.no_grad():
        features = torch.cat([run.model.body(problem.prepare(part)) for part in x.split(problem.batch)])
    for batch in islice(shuffled(len(x), problem.batch, problem.epochs, x.device), problem.steps):
        optimizer.zero_grad()
        loss_of(head(features[batch]), y[batch]).backward()
        optimizer.step()


def wise_ft(problem: Problem, seed: int, dial: float) -> Run:
    """WiSE-FT: fine-tune, then interpolate the shared parameters; at a dial of 1 they are the fine-tuned ones.

    Of adapters, B is multiplied by the dial, and so the product. The training is that of `plain`, for all dials.
    """
    if problem.shared.get("plain", (None,))[0] != seed:
        plain(problem, seed, 1.0)
    run = Run(problem, seed)
    _, state, run.shared_seconds = problem.shared["plain"]
    run.model.load_state_dict(state)
    adapted = bool(factors_of(run.model))
    with torch.no_grad():
        for name, p in run.backbone().items():
            if not (adapted and name.endswith(".a")):
                p.copy_(run.original.get_parameter(name).lerp(p, dial))
    return run


def l2_sp(problem: Problem, seed: int, dial: float) -> Run:
    """L2-SP: a penalty on the squared distance from the original parameters."""
    return moored(problem, seed, {"importance": "uniform", "pull": mooring.Penalty(dial)})


def ewc(problem: Problem, seed: int, dial: float) -> Run:
    """EWC: the same penalty, weighted by the Fisher information on the reference."""
    importance = mooring.EWC(decay=None, per_sample=True)
    return moored(problem, seed, {"importance": importance, "pull": mooring.Penalty(dial)})


def distillation(problem: Problem, seed: int, dial: float) -> Run:
    """Add the divergence from the original model on the reference, times the dial."""
    run = Run(problem, seed)
    run.penalty = lambda step: dial * run.divergence(run.old_batch(step)[0])
    run.train()
    return run


def replay(problem: Problem, seed: int, dial: float) -> Run:
    """Add the loss on the reference with its labels, times the dial."""
    run = Run(problem, seed)

    def penalty(step: int) -> Tensor:
        x, y = run.old_batch(step)
        return dial * loss_of(run.model(x), y)

    run.penalty = penalty
    run.train()
    return run


def projection(problem: Problem, seed: int, dial: float) -> Run:
    """Project each layer into a ball around the original one after each step, as TPGM and FTP do.

    Its radius is the dial times the norm of the layer. Those methods learn a radius for each layer.
    """
    run = Run(problem, seed)
    names = list(run.backbone())
    parameters, anchors = list(run.backbone().values()), [run.original.get_parameter(name) for name in names]
    radii = [dial * norm for norm in torch._foreach_norm(anchors)]

    @torch.no_grad()
    def after_step() -> None:
        moved = torch._foreach_sub(parameters, anchors)
        norms = torch._foreach_norm(moved)
        factors = [(r / n.clamp(min=1e-12)).clamp(max=1) for r, n in zip(radii, norms, strict=True)]
        torch._foreach_mul_(moved, factors)
        torch._foreach_copy_(parameters, torch._foreach_add(anchors, moved))

    run.after_step = after_step
    run.train()
    return run


def lora(problem: Problem, seed: int, dial: float) -> Run:
    """LoRA on linear layers and 1 x 1 convolutions; the dial is the rank. Other parameters are frozen."""
    run = Run(problem, seed)
    run.model.requires_grad_(False)
    add_adapters(run.model.body if run.model.new_head is not None else run.model, int(dial))
    head = list(run.model.new_head.requires_grad_(True).parameters()) if run.model.new_head is not None else []
    run.trained = [*factors_of(run.model), *head]
    run.optimizer = problem.optimizer(run.trained, problem.head_rate)
    run.train()
    return run


def attach(run: Run, options: dict[str, Any], *, labels: bool = True) -> None:
    """Moor the network of a run, with its reference, and leave a new head free."""
    prepared = [(run.problem.prepare(x), y) for x, y in run.reference]
    reference = prepared if labels else [x for x, _ in prepared]
    exclude = ("new_head.*",) if run.model.new_head is not None else ()
    run.moor = mooring.attach(run.model, run.optimizer, reference=reference, exclude=exclude, progress=False, **options)


def moored(problem: Problem, seed: int, options: dict[str, Any], *, labels: bool = True) -> Run:
    """Train with a Mooring, and finish a budget that is measured."""
    run = Run(problem, seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attach(run, options, labels=labels)
        run.train()
    if "forgetting=measured" in repr(run.moor):
        run.gauge = run.moor.finish().nats
    run.moor.detach()
    return run


def budget(problem: Problem, seed: int, dial: float) -> Run:
    """Mooring with its default options: a budget that is measured, and distillation."""
    return moored(problem, seed, {"pull": mooring.Budget(dial)})


def budget_without_distillation(problem: Problem, seed: int, dial: float) -> Run:
    """A measured budget with the pull alone."""
    return moored(problem, seed, {"pull": mooring.Budget(dial, distil=False)})


def budget_kronecker(problem: Problem, seed: int, dial: float) -> Run:
    """A measured budget with Kronecker factors, and distillation."""
    return moored(problem, seed, {"pull": mooring.Budget(dial), "importance": Kronecker()})


def budget_kronecker_without_distillation(problem: Problem, seed: int, dial: float) -> Run:
    """A measured budget with Kronecker factors and the pull alone."""
    return moored(problem, seed, {"pull": mooring.Budget(dial, distil=False), "importance": Kronecker()})


def budget_estimated(problem: Problem, seed: int, dial: float) -> Run:
    """A budget that is estimated, not measured."""
    return moored(problem, seed, {"pull": mooring.Budget(dial, measured=False)})


def budget_new_inputs(problem: Problem, seed: int, dial: float) -> Run:
    """Mooring without any old data: the inputs of the new task are the reference."""
    new = copy.copy(problem)
    count = len(problem.reference[0])
    new.reference = problem.new_train[0][:count], problem.new_train[1][:count]
    return moored(new, seed, {"pull": mooring.Budget(dial)}, labels=False)


METHODS: dict[str, tuple[Callable[[Problem, int, float], Run], list[float]]] = {
    "plain": (plain, [0.1, 0.3, 1.0]),
    "wise-ft": (wise_ft, [0.1, 0.3, 0.5, 0.7]),  # after plain, whose training it shares
    "linear-probe": (linear_probe, [10.0]),
    "lp-ft": (probe_then_finetune, [0.1, 0.3, 1.0]),
    "budget": (budget, NATS),
    "distillation": (distillation, [0.3, 1.0, 3.0, 10.0, 30.0]),
    "replay": (replay, [0.3, 1.0, 3.0]),
    "l2-sp": (l2_sp, [0.01, 0.1, 1.0, 10.0]),
    "ewc": (ewc, [1.0, 10.0, 100.0, 1000.0]),
    "projection": (projection, [0.01, 0.03, 0.1]),
    "lora": (lora, [4.0, 16.0]),
    "budget-no-distil": (budget_without_distillation, NATS),
    "budget-estimated": (budget_estimated, NATS),
    "budget-new-inputs": (budget_new_inputs, NATS),
    "budget-kronecker": (budget_kronecker, NATS),
    "budget-kronecker-no-distil": (budget_kronecker_without_distillation, NATS),
}
"""The methods with the values of their dials."""

NOT_FOR_ADAPTERS = {"linear-probe", "lp-ft", "projection", "lora", "budget-kronecker", "budget-kronecker-no-distil"}
"""Methods for which adapters are no case of their own.

No last layer is trained, B = 0 has no size that a projection could keep, and a budget holds products by Kronecker
factors in any case.
"""
