"""The methods: each takes a task, a seed and the value of its dial, trains adapters, and returns a `Trained`."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, OSFConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from torch import Tensor, nn
from torch.nn import functional

import mooring
from peers.adapter_task import Batch, Result, Task, loss_of

RANK = 8
PARTS = 4
"""Plain training is evaluated after each of so many parts, for early stopping."""
SEQUENCES = 256
"""The inputs of the reference that CorDA reads, one after the other; PEFT's documentation finds so many enough."""

Extra = Callable[[nn.Module, Batch], Tensor]
"""A term that is added to the loss of a batch."""


@dataclass(frozen=True)
class Trained:
    """The outcome of a run.

    Attributes:
        results: what was kept and learned after each part of the training; the last is the final one.
        nats: the forgetting that Mooring measured at the end, if it measures.
    """

    results: list[Result]
    nats: float | None = None


def train(
    task: Task,
    model: nn.Module,
    seed: int,
    *,
    rate: float = 1.0,
    pull: mooring.Budget | None = None,
    extra: Extra | None = None,
    parts: int = 1,
) -> Trained:
    """Train the adapters of a model, and evaluate it after each of so many parts."""
    batches = task.batches(seed)
    optimizer = task.optimizer([p for p in model.parameters() if p.requires_grad], rate)
    moor = None
    if pull is not None:
        moor = mooring.attach(model, optimizer, pull=pull, reference=task.reference, progress=False)
    ends = {math.ceil(len(batches) * part / parts) for part in range(1, parts)}
    results = []
    for number, batch in enumerate(batches, 1):
        optimizer.zero_grad()
        with task.autocast():
            loss = loss_of(model, batch)
            if extra is not None:
                loss = loss + extra(model, batch)
        loss.backward()
        optimizer.step()
        if number in ends:
            results.append(task.evaluate(model))
    nats = moor.finish().nats if moor is not None and moor.running_forgetting is not None else None
    return Trained([*results, task.evaluate(model)], nats)


def lora(task: Task, rank: int = RANK) -> nn.Module:
    """Return the base model with new LoRA adapters whose scale is 1."""
    return get_peft_model(copy.deepcopy(task.base), lora_config(task, rank))


def lora_config(task: Task, rank: int = RANK, **options: Any) -> LoraConfig:
    """Return PEFT's configuration of adapters whose scale is 1."""
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=task.targets, **options)


def plain(task: Task, seed: int, rank: float) -> Trained:
    """Train LoRA adapters and nothing else; the parts of it are those of early stopping."""
    return train(task, lora(task, int(rank)), seed, parts=PARTS)


def smaller_rank(task: Task, seed: int, rank: float) -> Trained:
    """Use a smaller rank."""
    return train(task, lora(task, int(rank)), seed)


def smaller_rate(task: Task, seed: int, rate: float) -> Trained:
    """Use a smaller learning rate."""
    return train(task, lora(task), seed, rate=rate)


def moored(task: Task, seed: int, nats: float) -> Trained:
    """Hold the products with a measured budget, and distil from the rest of the reference in some steps."""
    return train(task, lora(task), seed, pull=mooring.Budget(nats))


def moored_every_step(task: Task, seed: int, nats: float) -> Trained:
    """The same with distillation in every step."""
    return train(task, lora(task), seed, pull=mooring.Budget(nats, distil=True))


def moored_by_estimate(task: Task, seed: int, nats: float) -> Trained:
    """Hold the products with a budget that is estimated on the reference."""
    return train(task, lora(task), seed, pull=mooring.Budget(nats, measured=False))


def divergence(task: Task, model: nn.Module, x: Tensor) -> Tensor:
    """Return the mean KL divergence of a model from the base model."""
    with torch.no_grad():
        before = task.base(x).flatten(0, -2).log_softmax(-1)
    now = model(x).flatten(0, -2).log_softmax(-1)
    return functional.kl_div(now, before, reduction="batchmean", log_target=True)


def kl_new(task: Task, seed: int, weight: float) -> Trained:
    """Add the divergence from the base model on the new inputs."""
    return train(task, lora(task), seed, extra=lambda model, batch: weight * divergence(task, model, batch[0]))


def kl_reference(task: Task, seed: int, weight: float) -> Trained:
    """Add the divergence from the base model on the reference, which needs it in every step."""
    turn = _endless(task.reference)
    return train(task, lora(task), seed, extra=lambda model, batch: weight * divergence(task, model, next(turn)[0]))


def replay(task: Task, seed: int, weight: float) -> Trained:
    """Add the loss on the reference, which needs it in every step."""
    turn = _endless(task.reference)
    return train(task, lora(task), seed, extra=lambda model, batch: weight * loss_of(model, next(turn)))


def o_lora(task: Task, seed: int, weight: float) -> Trained:
    """Add |A_old A'| summed, as O-LoRA does.

    There is no older adapter, so A_old are the first right singular vectors of the base weights.
    """
    model = lora(task)
    if "o_lora" not in task.shared:
        weights = [layer.base_layer.weight.detach() for layer in _adapted(model)]
        task.shared["o_lora"] = [_first_right_vectors(w) for w in weights]
    adapters = [layer.lora_A["default"].weight for layer in _adapted(model)]
    pairs = list(zip(task.shared["o_lora"], adapters, strict=True))

    def overlap(model: nn.Module, batch: Batch) -> Tensor:
        return weight * torch.stack([(old @ a.mT).abs().sum() for old, a in pairs]).sum()

    return train(task, model, seed, extra=overlap)


def lora_null(task: Task, seed: int, rate: float) -> Trained:
    """Start from the part of the base weights that acts on the null space of the reference's inputs; A is frozen.

    LoRA-Null: the null space is spanned by the eigenvectors V of C with the smallest eigenvalues, as many as the rank.
    The part is W V V' = U S (V R)', with the singular value decomposition W V = U S R'.
    """
    if "lora_null" not in task.shared:
        model = lora(task)
        moments = _input_moments(task)
        with torch.no_grad():
            for name, layer in zip(_target_names(task), _adapted(model), strict=True):
                weight = layer.base_layer.weight
                null = torch.linalg.eigh(moments[name].to(weight.dtype))[1][:, :RANK]
                u, s, r = torch.linalg.svd(weight @ null, full_matrices=False)
                rank = len(s)
                root, a, b = s.sqrt(), layer.lora_A["default"].weight, layer.lora_B["default"].weight
                a[:rank], b[:, :rank] = root[:, None] * (r @ null.mT), u * root
                weight -= b @ a
                a.requires_grad_(False)
        task.shared["lora_null"] = model
    return train(task, copy.deepcopy(task.shared["lora_null"]), seed, rate=rate)


def corda(task: Task, seed: int, rate: float) -> Trained:
    """Start from CorDA's directions in its knowledge-preserved mode, as PEFT has it."""
    if "corda" not in task.shared:
        base = copy.deepcopy(task.base)
        config = lora_config(task, init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm"))

        def run() -> None:
            if task.reference[0][0].dtype != torch.long:
                for x, _ in task.reference:
                    base(x)
                return
            for x in torch.cat([x for x, _ in task.reference])[:SEQUENCES].split(1):  # PEFT's sums are of one sequence
                base(x)

        preprocess_corda(base, config, run_model=run)
        task.shared["corda"] = get_peft_model(base, config)
    return train(task, copy.deepcopy(task.shared["corda"]), seed, rate=rate)


def osf(task: Task, seed: int, part: float) -> Trained:
    """Train the smallest singular directions only, orthogonally to the others, as PEFT's OSF does."""
    base = copy.deepcopy(task.base, {id(p): p for p in task.base.parameters()})  # with the same weights, which stay
    decompositions = task.shared.setdefault("svd", {})
    decompose = torch.linalg.svd

    def once(weight: Tensor, full_matrices: bool) -> Any:
        key = weight.data_ptr()
        if key not in decompositions:
            decompositions[key] = decompose(weight, full_matrices=full_matrices)
        return [tensor.clone() for tensor in decompositions[key]]  # slices of them are trained

    with patch.object(torch.linalg, "svd", once):
        model = get_peft_model(base, OSFConfig(effective_rank=part, target_modules=task.targets))
    return train(task, model, seed)


Method = Callable[[Task, int, float], Trained]

MOORING = "Mooring"
PLAIN = "plain LoRA"
METHODS: dict[str, Method] = {
    PLAIN: plain,
    MOORING: moored,
    "Mooring, every step": moored_every_step,
    "Mooring, estimated": moored_by_estimate,
    "KL on the reference": kl_reference,
    "replay of the reference": replay,
    "KL on new inputs": kl_new,
    "smaller learning rate": smaller_rate,
    "smaller rank": smaller_rank,
    "O-LoRA": o_lora,
    "LoRA-Null": lora_null,
    "CorDA (KPM)": corda,
    "OSF": osf,
}

DIALS: dict[str, dict[str, list[float]]] = {
    "digits": {
        PLAIN: [RANK],
        MOORING: [0.03, 0.1, 0.01, 0.003, 0.001, 0.3],
        "Mooring, every step": [0.03, 0.1, 0.01, 0.003, 0.001, 0.3],
        "Mooring, estimated": [0.01, 0.03, 0.003, 0.001, 0.1, 0.3],
        "KL on the reference": [3, 1, 10, 0.3, 0.1],
        "replay of the reference": [1, 3, 0.3, 0.1],
        "KL on new inputs": [0.01, 0.1, 1, 0.03, 0.3],
        "smaller learning rate": [0.2, 0.1, 0.3, 0.15, 0.5, 0.03],
        "smaller rank": [2, 1, 4],
        "O-LoRA": [0.01, 0.1, 1, 10],
        "LoRA-Null": [10, 30, 3, 100, 1],
        "CorDA (KPM)": [0.03, 0.1, 0.01, 0.003, 0.001, 1],
        "OSF": [0.6, 0.75, 0.5, 0.9, 0.25],
    },
    "gpt": {
        PLAIN: [RANK],
        MOORING: [0.1, 0.05, 0.03, 0.2],
        "Mooring, every step": [0.1, 0.05, 0.03, 0.2],
        "KL on the reference": [0.5, 0.2, 2],
        "replay of the reference": [0.5, 2, 0.2],
        "KL on new inputs": [1, 0.5, 3],
        "smaller learning rate": [0.1, 0.2, 0.3],
        "smaller rank": [1, 2],
        "O-LoRA": [10, 3, 30],
        "LoRA-Null": [10, 5, 20],
        "CorDA (KPM)": [0.1, 0.2, 0.4],
        "OSF": [0.97, 0.9, 0.75],
    },
}
"""The values of each method's dial, by the task, those that tell most first."""


def _endless(batches: Sequence[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _first_right_vectors(weight: Tensor) -> Tensor:
    """Return the right singular vectors of the largest singular values, (rank, in), from the smaller Gram matrix."""
    if weight.shape[1] <= weight.shape[0]:
        return torch.linalg.eigh(weight.mT @ weight)[1][:, -RANK:].mT
    values, vectors = torch.linalg.eigh(weight @ weight.mT)
    return (weight.mT @ vectors[:, -RANK:] / values[-RANK:].sqrt()).mT


def _target_names(task: Task) -> list[str]:
    return [name for name, _ in task.base.named_modules() if name.rpartition(".")[2] in task.targets]


def _input_moments(task: Task) -> dict[str, Tensor]:
    """Return the sum of x x' over the reference's inputs x of each layer, by its name."""
    moments: dict[str, Tensor] = {}
    handles = []
    for name in _target_names(task):

        def observe(module: nn.Module, args: tuple[Tensor], returned: Tensor, name: str = name) -> None:
            rows = args[0].flatten(0, -2).double()  # TF32 would hide small eigenvalues
            moments[name] = moments.get(name, 0) + rows.mT @ rows

        handles.append(task.base.get_submodule(name).register_forward_hook(observe))
    with torch.no_grad():
        for x, _ in task.reference:
            task.base(x)
    for handle in handles:
        handle.remove()
    return moments
