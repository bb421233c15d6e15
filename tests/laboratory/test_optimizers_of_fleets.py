"""A run with AdamW, or with a schedule, equals the run alone and a hand-written loop, for every family of methods."""

from dataclasses import replace

import pytest
import torch

from laboratory import test_functional, test_laplace, test_projections, test_replay
from laboratory.small import class_stream, gpu, spec_for, trained_by_hand
from mooring.errors import MooringError
from mooring_lab.fleet.adamw import AdamW
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.gpu.run_kernel import run_kernel_source
from mooring_lab.fleet.sgd import SGD
from mooring_lab.methods import METHODS
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.training import default_training

STREAM = class_stream()
EXACT = {"rtol": 1e-9, "atol": 1e-9}
ADAMW = {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.1}
SETTINGS = {
    "adamw": ADAMW,
    "adamw, warm-up": {**ADAMW, "schedule": "warmup-linear"},
    "sgd, warm-up": {"schedule": "warmup-linear"},
    "sgd, cosine": {"schedule": "cosine"},
}
ATTACHED = {
    "baselines": ["plain", "joint", "frozen-after-first"],
    "penalties": ["ewc", "clamped-ewc", "balanced-ewc", "mas", "si", "rwalk", "l2-sp"],
    "steps": ["explicit-ewc", "explicit-mas", "explicit-si", "proximal-ewc", "sfa"],
    "merging": ["wise-ft", "imm-mean", "imm-mode", "cofima"],
    "budgets": ["budget-ewc", "budget-kronecker"],
}
"""Methods of each family that `mooring.attach` has."""

LOOPS = {
    "er": test_replay.Loop,
    "er-2-updates": test_replay.Loop,
    "a-gem": test_replay.Loop,
    "lwf": test_functional.LwFLoop,
    "der++": test_functional.DerLoop,
    "laplace-kronecker": test_laplace.Loop,
    "gpm": test_projections.GradientLoop,
    "ftp": test_projections.RadiusLoop,
    "tpgm": test_projections.RadiusLoop,
}
"""The loop of every other family."""


def weights(specs: list[RunSpec], device: str = "cpu") -> dict[str, dict[str, torch.Tensor]]:
    """The final weights of each run, by its key."""
    fleet = Fleet(specs, STREAM, device=device)
    order = [spec for s in fleet.specs for spec in fleet.strength_groups.get(s.key, [s])]
    results = fleet.run()
    assert {result.status for result in results} == {"finished"}
    return {spec.key: fleet.stack.network_of(row).cpu().state_dict() for row, spec in enumerate(order)}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", [name for family in ATTACHED.values() for name in family])
def test_run_equals_a_loop_with_attach(method: str, setting: str) -> None:
    spec = spec_for(method, STREAM, seed=3, **SETTINGS[setting])
    torch.testing.assert_close(weights([spec])[spec.key], trained_by_hand(spec, STREAM).state_dict(), **EXACT)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", LOOPS)
def test_run_equals_a_loop_of_its_own(method: str, setting: str) -> None:
    network = {"network": test_laplace.NETWORK} if method == "laplace-kronecker" else {}
    spec = spec_for(method, STREAM, seed=3, **network, **SETTINGS[setting])
    loop = LOOPS[method](spec, STREAM)
    expected = loop.train()
    model = expected if isinstance(expected, torch.nn.Module) else loop.model
    torch.testing.assert_close(weights([spec])[spec.key], model.state_dict(), **EXACT)


def test_runs_with_numbers_and_schedules_of_their_own_train_together() -> None:
    numbers = [(0.9, 0.1, "constant"), (0.9, 0.0, "warmup-linear"), (0.5, 0.1, "cosine"), (0.0, 0.1, "warmup-linear")]
    specs = [
        spec_for(method, STREAM, seed, lr=lr, momentum=beta, weight_decay=decay, schedule=schedule, optimizer="adamw")
        for method in ("plain", "clamped-ewc", "proximal-ewc")
        for seed, (lr, (beta, decay, schedule)) in enumerate(zip((0.001, 0.002, 0.004, 0.01), numbers, strict=True))
    ]
    together = weights(specs)
    for spec in specs:
        torch.testing.assert_close(together[spec.key], trained_by_hand(spec, STREAM).state_dict(), **EXACT)


def test_runs_that_fail_leave_the_schedules_of_the_others_as_they_are() -> None:
    specs = [spec_for("proximal-ewc", STREAM, seed, schedule="warmup-linear") for seed in (0, 1, 2)]
    specs[0] = replace(specs[0], lr=1e200)
    fleet = Fleet(specs, STREAM)
    statuses = {result.spec.seed: result.status for result in fleet.run()}
    assert statuses == {0: "unstable", 1: "finished", 2: "finished"}
    expected = trained_by_hand(specs[2], STREAM).state_dict()
    torch.testing.assert_close(fleet.stack.network_of(1).state_dict(), expected, **EXACT)


def test_runs_of_two_optimizers_are_of_two_fleets() -> None:
    specs = [spec_for("plain", STREAM, optimizer=optimizer) for optimizer in ("sgd", "adamw")]
    with pytest.raises(MooringError, match="runs of one shape"):
        Fleet(specs, STREAM)


def test_adamw_with_late_and_missing_gradients_equals_torch() -> None:
    """A head has no gradient in some steps: its running means are corrected for the steps that it took."""
    torch.manual_seed(0)
    lr, betas, decays = [0.01, 0.3], [0.9, 0.0], [0.0, 0.5]
    parameters = {name: torch.randn(2, *shape).double() for name, shape in {"weight": (3, 2), "head": (3,)}.items()}
    fleet = AdamW(*(torch.tensor(values, dtype=torch.float64) for values in (lr, betas, decays)))
    alone = []
    for run in range(2):
        copies = {name: torch.nn.Parameter(p[run].clone()) for name, p in parameters.items()}
        settings = {"lr": lr[run], "betas": (betas[run], 0.999), "weight_decay": decays[run]}
        alone.append((copies, torch.optim.AdamW(copies.values(), **settings)))
    for step in range(40):
        gradients = {name: torch.randn_like(p) for name, p in parameters.items() if name == "weight" or step % 3 == 1}
        fleet.step(parameters, gradients)
        for run, (copies, optimizer) in enumerate(alone):
            for name, p in copies.items():
                p.grad = gradients[name][run] if name in gradients else None
            optimizer.step()
            for name, p in copies.items():
                torch.testing.assert_close(parameters[name][run], p.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("numbers", [0.9, torch.tensor([0.9, 0.5])], ids=["one", "one for each run"])
@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_rule_of_every_optimizer_can_be_written_as_a_kernel(kind, numbers) -> None:
    optimizer = kind(torch.ones(2), numbers, numbers)
    theta, rows = torch.ones(2, 3), slice(None)
    optimizer.allocate("weight", theta)
    tensors = {"theta": theta, "g": theta, **optimizer.elements("weight"), **optimizer.per_run_numbers(rows)}
    tensors |= optimizer.count_step(["weight"], rows).get("weight", {})
    source = run_kernel_source(lambda given: optimizer.update(given, given["g"]), tensors, ["g"])
    assert all(f"tl.store(p_{name}" in source for name in ("theta", *optimizer.elements("weight")))


GPU_METHODS = ["plain", "ewc", "mas", "si", "explicit-ewc", "proximal-ewc", "balanced-ewc", "budget-ewc", "er", "der++"]
GPU_METHODS += ["laplace-kronecker", "lwf"]


@gpu
@pytest.mark.parametrize("setting", ["adamw, warm-up", "sgd, warm-up"])
@pytest.mark.parametrize("method", GPU_METHODS)
def test_kernels_on_a_gpu_equal_eager_steps_on_a_cpu(method: str, setting: str) -> None:
    assert method in METHODS
    stream = class_stream(tasks=3, images=125)
    specs = [spec_for(method, stream, seed, **SETTINGS[setting]) for seed in (0, 1)]
    specs[1] = replace(specs[1], lr=0.002, momentum=0.5, weight_decay=0.01)
    fleets = [Fleet(specs, stream, device=device) for device in ("cpu", "cuda")]
    for fleet in fleets:
        fleet.run()
    assert fleets[1].groups.fused
    cpu, cuda = ({name: p.detach().cpu() for name, p in fleet.stack.parameters.items()} for fleet in fleets)
    torch.testing.assert_close(cpu, cuda, **EXACT)


def test_default_learning_rate_is_that_of_the_optimizer() -> None:
    chosen = default_training("digits", optimizer="adamw"), default_training("digits", optimizer="adamw", lr=0.01)
    assert [training.lr for training in (default_training("digits"), *chosen)] == [0.03, 0.001, 0.01]
