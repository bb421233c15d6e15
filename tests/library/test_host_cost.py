"""The host's work in a step, per parameter: a model of thousands of small tensors waits for Python, not for its GPU."""

import gc
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mooring
import mooring.backends.budget_solver
import mooring.backends.finite_guard
import mooring.backends.fused
import mooring.backends.gradients
import mooring.backends.kernels.multi_tensor
import mooring.backends.kernels.reduce
import mooring.backends.step_kernels
import mooring.step
from mooring import EWC, Budget, Interpolation, Memory, Penalty
from mooring.backends.finite_guard import FiniteGuard
from mooring.backends.kernels.tensor_list import TensorList
from mooring.errors import NonFiniteError, UnheldWarning

FISHER = EWC(decay=None, per_sample=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "explicit": {"importance": EWC(), "pull": Interpolation()},
    "penalty": {"importance": EWC(), "pull": Penalty(1e-4)},
    "budget": {"importance": FISHER, "pull": Budget(0.1, measured=False)},
    "lean budget": {
        "importance": FISHER,
        "pull": Budget(0.1, measured=False),
        "memory": Memory(previous="8bit", current="none"),
    },
}


def use_empty_kernels(monkeypatch) -> None:
    """Let a step do everything as on a GPU, with kernels that do nothing."""
    backends = mooring.backends
    for module in (backends.kernels.multi_tensor, backends.kernels.reduce, backends.finite_guard):
        monkeypatch.setattr(module, "compile_kernel", lambda *given: object())
        monkeypatch.setattr(module, "launch", lambda *given, **options: None)
    checks = backends.finite_guard, backends.gradients
    for module in (*checks, backends.fused, backends.budget_solver, backends.step_kernels, mooring.step):
        monkeypatch.setattr(module, "has_compiler", lambda device: True)
    monkeypatch.setattr(backends.budget_solver, "is_small", lambda state: False)


class Sum(nn.Module):
    """A sum of linear layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(2, 2) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.stack(list(self.weights)).sum(0)


def calls_in_a_step(count: int, options: dict[str, Any] | None) -> int:
    """Return the calls in `optimizer.step()` of a model with so many parameters, once plans are made.

    Gradients stay where they are, and the least of many steps counts: where a tensor got other memory than in the step
    before, its address is read again.
    """
    torch.manual_seed(0)
    model, x = Sum(count), torch.randn(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with pytest.MonkeyPatch.context() as monkeypatch:
        if options is not None:
            mooring.attach(model, optimizer, reference=[(x, torch.tensor([0, 1, 0, 1]))], progress=False, **options)
            use_empty_kernels(monkeypatch)
        calls, calls_of_steps = 0, []

        def on_event(frame, event, arg):
            nonlocal calls
            calls += event in ("call", "c_call")

        for _ in range(23):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().mean().backward()
            calls = 0
            gc.disable()  # finalizers of what other tests left are no part of the step
            sys.setprofile(on_event)
            try:
                optimizer.step()
            finally:
                sys.setprofile(None)
                gc.enable()
            calls_of_steps.append(calls)
    return min(calls_of_steps[3:])


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_step_calls_nothing_for_each_parameter(name):
    """A rule or check for each one takes dozens of calls; comprehensions and maps over all of them take none."""
    plain = calls_in_a_step(30, None) - calls_in_a_step(10, None)
    moored = calls_in_a_step(30, OPTIONS[name]) - calls_in_a_step(10, OPTIONS[name])
    assert moored <= plain


def run_as_written(known, source: str, *args: Tensor) -> None:
    """Do what a kernel of the guard does to the tensors at the addresses in a layout."""
    tensors = known.tensors
    if len(args) == 2:
        positions, bad = args
        for position, t in zip(positions.tolist(), tensors, strict=True):
            if not t.isfinite().all():
                bad[position] = 1.0
    elif args[0]:
        for t in tensors:
            t.zero_()


@pytest.mark.parametrize("bad", [None, float("nan"), float("-inf")])
def test_guard_names_bad_tensors_of_any_dtype_and_zeroes_all(bad, monkeypatch):
    guards = mooring.backends.finite_guard
    monkeypatch.setattr(guards, "has_compiler", lambda device: True)
    monkeypatch.setattr(guards._KnownTensors, "run", run_as_written)
    follow = guards._KnownTensors.follow

    def follow_tensors(self, tensors):
        follow(self, tensors)
        object.__setattr__(self, "tensors", [tensors.tensors[index] for index in self.indices])

    monkeypatch.setattr(guards._KnownTensors, "follow", follow_tensors)
    guard = FiniteGuard()
    for _ in range(2):  # the second time with what is kept of the first
        checked = [torch.ones(3), torch.zeros(0), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, 2).T]
        other = torch.full((2,), torch.nan)  # not checked
        if bad is not None:
            checked[2][1] = checked[3][0, 1] = bad
        lists = TensorList().replace(checked), TensorList().replace([other])
        assert guard.check("gradient", ["a", "b", "c", "d"], *lists)
        if bad is None:
            guard.report()
            assert checked[0].sum() == 3
            assert other.isnan().all()
        else:
            with pytest.raises(NonFiniteError, match="the gradient of 'c', and of 1 more was not finite"):
                guard.report()
            assert not any(t.any() for t in (*checked, other))


def test_guard_leaves_tensors_that_are_not_dense_to_others(monkeypatch):
    monkeypatch.setattr(mooring.backends.finite_guard, "has_compiler", lambda device: True)
    for refused in (torch.ones(4, 4)[:, :2], torch.ones(2, dtype=torch.int32)):
        assert not FiniteGuard().check("gradient", ["a"], TensorList().replace([refused]))


def moored(pull=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="ewc", pull=pull)
    x = torch.randn(4, 3, dtype=torch.float64)
    train(model, optimizer, x)
    moor.consolidate()
    train(model, optimizer, x)
    return model, optimizer, moor, x


def train(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_parameter_that_moves_to_another_group_gets_its_learning_rate():
    model, optimizer, moor, x = moored(mooring.Penalty(10.0))
    first, second = model.parameters()
    optimizer.param_groups[0]["params"] = [first]
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [second], "lr": 0.02})
    optimizer.zero_grad()
    model(x).square().mean().backward()
    gradient, before = second.grad.clone(), second.detach().clone()
    optimizer.step()
    force = 10.0 * moor.previous["1.weight"] * (before - moor.anchor["1.weight"])
    torch.testing.assert_close(second.detach(), before - 0.02 * (gradient + force))


def test_parameter_without_a_gradient_for_one_step_is_counted_in_the_others():
    model, optimizer, moor, x = moored()
    model[1].requires_grad_(False)
    train(model, optimizer, x)
    model[1].requires_grad_(True)
    train(model, optimizer, x)
    counts = {state.name: state.count for state in moor._states.records.values()}
    assert counts == {"0.weight": 3, "1.weight": 2}


def test_parameter_that_joins_the_model_is_moored_once_the_model_is_read_again():
    model, optimizer, moor, x = moored()
    head, other = (nn.Linear(3, 1, bias=False).double() for _ in range(2))
    optimizer.add_param_group({"params": list(head.parameters())})
    model.forward = lambda x: model[1](model[0](x))

    def step_with_heads():
        optimizer.zero_grad()
        (head(model(x)).square().mean() + other(x).square().mean()).backward()
        optimizer.step()

    step_with_heads()
    model.add_module("head", head)
    step_with_heads()
    assert "head.weight" not in moor.anchor
    optimizer.add_param_group({"params": list(other.parameters())})  # unknown, so the model is read again
    step_with_heads()
    with pytest.warns(UnheldWarning, match=r"'head\.weight' appeared"):
        step_with_heads()
    assert "head.weight" in moor.anchor
    assert not any("other" in name for name in moor.anchor)


def test_parameter_with_other_strides_gets_a_penalized_gradient_of_its_values():
    model, optimizer, moor, x = moored(mooring.Penalty(10.0))
    first, _ = model.parameters()
    first.data = first.data.T.contiguous().T  # the same values in another order of memory
    optimizer.zero_grad()
    model(x).square().mean().backward()
    gradient, before = first.grad.clone(), first.detach().clone()
    optimizer.step()
    force = 10.0 * moor.previous["0.weight"] * (before - moor.anchor["0.weight"])
    torch.testing.assert_close(first.detach(), before - 0.1 * (gradient + force))


def test_kernel_of_a_penalty_writes_to_the_gradients_that_the_optimizer_gets(monkeypatch):
    """Also after a hook or an optimizer has given a gradient, which is kept for the next step, other memory."""
    model, x = Sum(3), torch.randn(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    options = OPTIONS["penalty"]
    moor = mooring.attach(model, optimizer, reference=[(x, torch.tensor([0, 1, 0, 1]))], progress=False, **options)
    use_empty_kernels(monkeypatch)
    given: list[list[int]] = []
    kept: list[Tensor] = []

    def replace_memory(*step) -> None:
        given.append([p.grad.data_ptr() for p in model.parameters()])
        kept.extend(p.grad.data for p in model.parameters())  # so that no memory is given out twice
        for p in model.parameters():
            p.grad.data = p.grad.data.clone()

    optimizer.register_step_pre_hook(replace_memory)
    for _ in range(3):
        train(model, optimizer, x)
        (((group,), *_),) = moor._step.kernels.penalty.plans.values()
        assert group.layout.addresses["penalized"] == given[-1]


class Probe:
    """Counts how often the addresses and forms of tensors are read."""

    def __init__(self, monkeypatch) -> None:
        self.reads = 0
        read = TensorList._read

        def counted(tensors):
            self.reads += not tensors._is_read
            read(tensors)

        monkeypatch.setattr(TensorList, "_read", counted)


@pytest.mark.parametrize("name", ["explicit", "penalty"])
def test_step_reads_the_addresses_of_parameters_and_gradients_once(name, monkeypatch):
    """The check, the penalty and the rule after the step share gradients; the memory of penalized ones is kept."""
    model, x = Sum(5), torch.randn(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    mooring.attach(model, optimizer, reference=[(x, torch.tensor([0, 1, 0, 1]))], progress=False, **OPTIONS[name])
    use_empty_kernels(monkeypatch)
    for _ in range(3):
        train(model, optimizer, x)
    probe = Probe(monkeypatch)
    train(model, optimizer, x)
    assert probe.reads == 2
