"""One kernel for all parameters does what the step does parameter by parameter; here without one, and on a GPU."""

import pytest
import torch
from torch import Tensor, nn

import mooring
import mooring.backends.budget_solver
import mooring.backends.fused
import mooring.backends.step_kernels
import mooring.state.offload
import mooring.step
from mooring import EWC, MAS, SI, Balanced, Interpolation, Penalty, Proximal, Random, RWalk, Uniform
from mooring.backends.kernels.multi_tensor import (
    Layout,
    MultiTensorKernel,
    memory_format,
    multi_tensor_source,
    trace_parameter,
)
from mooring.rules import Blend, Budget, Importance, ParameterPull, Pull
from mooring.testing import CASES, Case

gpu = pytest.mark.gpu

IMPORTANCES = [EWC(), EWC(decay=None, per_sample=True), MAS(), SI(), SI(sign="signed"), RWalk(), Uniform(), Random()]
IMPORTANCES += [Balanced(EWC())]
FIRST_QUICK = [IMPORTANCES[0], *(pytest.param(importance, marks=pytest.mark.slow) for importance in IMPORTANCES[1:])]
PULLS = [
    Interpolation(),
    Interpolation(root=3, stiffness=0.5, weight=2.0),
    Penalty(2.0),
    Penalty(2.0, clamp=True),
    Proximal(3.0),
    Blend(0.3, every=2),
]


class Places(Layout):
    """Where tensors are, by the tensors themselves."""

    def __init__(self, tensors: list[dict[str, Tensor]]) -> None:
        self.tensors = [dict(parameter) for parameter in tensors]
        self.rows = dict.fromkeys(tensors[0])
        self.formats = {name: [memory_format(parameter[name]) for parameter in tensors] for name in self.rows}
        self.addresses = {"theta": [parameter["theta"].data_ptr() for parameter in tensors]}

    def update(self, name: str, tensors: list[Tensor], addresses: list[int] | None = None) -> bool:
        before, self.addresses[name] = self.addresses.get(name), [tensor.data_ptr() for tensor in tensors]
        for ours, tensor in zip(self.tensors, tensors, strict=True):
            ours[name] = tensor
        return before != self.addresses[name]


class Rules:
    """What a kernel does, told to torch."""

    runs = 0

    def __init__(self, rule, tensors, numbers, wide) -> None:
        trace_parameter(rule, tensors, numbers, wide)  # refuses what cannot be written
        self.rule, self.numbers, self.wide, self.names = rule, numbers, wide, list(tensors)

    def __call__(self, layout: Places, numbers: dict[str, list[float]]) -> None:
        Rules.runs += 1
        for place, tensors in enumerate(layout.tensors):
            wide = {n: t.detach() if t.dtype == torch.bool else t.detach().to(self.wide) for n, t in tensors.items()}
            values = {n: torch.tensor(numbers[n][place], dtype=self.wide) for n in self.numbers}
            before = {name: tensor.clone() for name, tensor in wide.items()}
            self.rule(wide | values)
            for name, tensor in tensors.items():
                if not torch.equal(wide[name], before[name]):
                    tensor.data.copy_(wide[name])


@pytest.fixture
def emulated(monkeypatch):
    """Fused, but for the kernel."""
    for module in (mooring.backends.fused, mooring.backends.step_kernels, mooring.step):
        monkeypatch.setattr(module, "has_compiler", lambda device: True)
    monkeypatch.setattr(mooring.backends.fused, "Layout", Places)
    monkeypatch.setattr(mooring.backends.fused, "MultiTensorKernel", Rules)
    Rules.runs = 0


def without_kernels(monkeypatch) -> None:
    """As where there is no compiler."""
    for module in (
        mooring.backends.fused,
        mooring.backends.budget_solver,
        mooring.backends.step_kernels,
        mooring.step,
    ):
        monkeypatch.setattr(module, "has_compiler", lambda device: False)


def trained(case: Case, importance: Importance, pull: Pull) -> dict[str, Tensor]:
    """Three tasks, saved and loaded in the middle of the second."""
    torch.manual_seed(1)
    moored = case.attach(importance, pull)
    moored.train(3)
    moored.moor.consolidate()
    moored.train(2, first=3)
    moored.moor.load_state_dict({name: t.clone() for name, t in moored.moor.state_dict().items()})
    moored.train(2, first=5)
    moored.moor.consolidate()
    moored.train(2, first=7)
    return {**moored.snapshot(), **moored.moor.state_dict()}


@pytest.mark.parametrize("pull", [*PULLS, Budget(1e-3)], ids=repr)
@pytest.mark.parametrize("importance", FIRST_QUICK, ids=repr)
def test_the_same_rules_fused(importance, pull, emulated, monkeypatch):
    if isinstance(pull, Budget) and not isinstance(importance, EWC):
        pytest.skip("a budget is spent in curvature, which of these only EWC measures")
    case = next(case for case in CASES if str(case) == "attention-float64-adam")
    fused = trained(case, importance, pull)
    assert Rules.runs > 0
    without_kernels(monkeypatch)
    once = Rules.runs
    alone = trained(case, importance, pull)
    assert Rules.runs == once
    for name, tensor in alone.items():
        torch.testing.assert_close(fused[name], tensor, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def in_eight_bits(importance: Importance | None, pull: Pull, dtype=torch.float64, device="cpu") -> list[Tensor]:
    """Two tasks with rows of blocks, and of none; the second is pulled by codes."""
    torch.manual_seed(0)
    layers = [nn.Linear(70, 512), nn.ReLU(), nn.Linear(512, 48), nn.ReLU(), nn.Linear(48, 3)]
    model = nn.Sequential(*layers).to(device, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    memory = mooring.Memory(previous="8bit")
    moor = mooring.attach(model, optimizer, importance=importance, pull=pull, memory=memory)
    for step in range(5):
        optimizer.zero_grad()
        (10 * model(torch.randn(4, 70).to(device, dtype)).square().mean()).backward()
        optimizer.step()
        if step == 1:
            moor.consolidate()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("pull", PULLS, ids=repr)
def test_codes_are_read_by_the_same_rules_fused(pull, emulated, monkeypatch):
    fused, launches = in_eight_bits(EWC(), pull), Rules.runs
    without_kernels(monkeypatch)
    alone = in_eight_bits(EWC(), pull)
    assert Rules.runs == launches
    # the importance twice; then, for blocks of 70, 256 and 48, and for biases, what is pulled in each of three steps
    assert launches >= 2 + 3 * 4 * (not isinstance(pull, Blend))
    torch.testing.assert_close(fused, alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("pull", [Interpolation(), Interpolation(every=2), Penalty(2.0), Proximal(3.0)], ids=repr)
def test_anchors_from_the_host_are_found_where_they_are_staged(pull, emulated, monkeypatch):
    def trained(memory):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(20, 20) for _ in range(5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moor = mooring.attach(model, optimizer, pull=pull, memory=memory)
        for step in range(7):
            optimizer.zero_grad()
            (10 * model(torch.randn(3, 20)).square().mean()).backward()
            optimizer.step()
            if step in (1, 4):
                moor.consolidate()
        return [p.detach() for p in model.parameters()]

    near, launches = trained(None), Rules.runs
    monkeypatch.setattr(mooring.state.offload, "is_offloaded", lambda m: True)
    staged = trained(mooring.Memory(host=True, staging=5000))  # five groups of a layer, in two rooms
    assert Rules.runs - launches > launches
    assert all(torch.equal(*pair) for pair in zip(staged, near, strict=True))


def test_a_kernel_finds_the_numbers_of_a_block():
    def rule(terms):
        terms["theta"].mul_(terms["high"])

    terms = {"theta": torch.ones(6, 64), "high": torch.ones(6, 2)}
    text = multi_tensor_source(trace_parameter(rule, terms, [], torch.float32), terms, [], torch.float32)
    assert "x_high = tl.load(p_high + at // 32).to(tl.float32)" in text
    assert "x_theta = tl.load(p_theta + at).to(tl.float32)" in text


@gpu
@pytest.mark.parametrize("pull", [*PULLS, Budget(1e-6)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_codes_are_read_by_kernels_as_without(pull, dtype, monkeypatch):
    importance = None if isinstance(pull, Budget) else EWC()
    fused = in_eight_bits(importance, pull, dtype, "cuda")
    without_kernels(monkeypatch)
    alone = in_eight_bits(importance, pull, dtype, "cuda")
    close = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
    for one, two in zip(fused, alone, strict=True):
        torch.testing.assert_close(one, two, rtol=close, atol=close * float(two.abs().max()))


def test_one_launch_for_all_parameters_of_one_form(emulated):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="ewc")
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        if step == 1:
            moor.consolidate()
    assert Rules.runs == 4


@gpu
def test_on_a_gpu_samples_that_are_counted_there_leave_no_parameter_to_the_step(monkeypatch):
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance=EWC(decay=None, per_sample=True))
    for module in (mooring.step, mooring.backends.step_kernels):  # which do those that are left
        monkeypatch.setattr(module, "run_in_chunks", None)
    labels = torch.tensor([0, 1, -100], device="cuda")
    nn.functional.cross_entropy(model(torch.randn(3, 4, device="cuda")), labels).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(moor.current[name], 2 * p.grad.square())


def test_a_parameter_in_another_order_of_memory_is_left_to_the_step(emulated):
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.randn(4, 3).t())  # dense, but neither contiguous nor channels last
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="ewc")
    model(torch.randn(3, 4)).square().mean().backward()
    optimizer.step()
    assert Rules.runs == 1
    assert moor.current["weight"].abs().sum() > 0
    assert moor.current["bias"].abs().sum() > 0


@pytest.mark.parametrize("change", [lambda model: model.to(memory_format=torch.channels_last), nn.Module.double])
def test_parameters_that_change_their_form_within_a_task_are_planned_anew(change, emulated):
    """A kernel made for another order of memory, or another dtype, would take one weight for another."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="ewc", check_finite=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(torch.ones(2, 3, 5, 5, dtype=model.weight.dtype)).square().mean().backward()
        optimizer.step()

    step()
    moor.consolidate()
    step()
    (plan,) = moor._step.kernels.step.plans.values()
    change(model)
    step()
    (again,) = moor._step.kernels.step.plans.values()
    assert again is not plan
    forms = {form for part in again[0] for form in part.layout.formats["theta"]}
    assert {(p.dtype, p.stride()) for p in model.parameters()} >= forms
    step()
    assert again is next(iter(moor._step.kernels.step.plans.values()))


def test_channels_last_depthwise_and_pointwise_weights_run_in_kernels(emulated):
    """Strides of dimensions of size 1 differ between tensors in the same order, and say nothing."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, pull=Budget(1e-3))
    model(torch.randn(2, 4, 5, 5).to(memory_format=torch.channels_last)).square().mean().backward()
    optimizer.step()
    moor.consolidate()
    for state in moor._states.records.values():
        tensors = {**state.pull_tensors(), "theta": state.parameter}
        assert mooring.backends.fused.is_fusable(tensors), (state.name, {n: t.stride() for n, t in tensors.items()})


def test_a_rule_that_cannot_be_written_is_left_to_the_step(emulated):
    class Sorted(ParameterPull):
        def rate(self, previous, current, lr):
            return previous.sort().values * 0 + 0.5 * (previous > 0)

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="uniform", pull=Sorted())
    for _ in range(2):
        optimizer.zero_grad()
        before = model.weight.detach().clone()
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        moor.consolidate()
    whole = before - 0.1 * model.weight.grad
    torch.testing.assert_close(model.weight.detach(), (whole + before) / 2)


def test_what_a_rule_does_not_read_is_not_fetched_and_tails_are_masked():
    def rule(terms):
        terms["theta"].lerp_(terms["anchor"], terms["rate"])

    tensors = {"theta": torch.ones(5, dtype=torch.bfloat16), "anchor": torch.ones(5), "g": torch.ones(5)}
    traced = trace_parameter(rule, tensors, ["rate"], torch.float32)
    text = multi_tensor_source(traced, tensors, ["rate"], torch.float32)
    assert "p_g" not in text
    assert "x_theta = tl.load(p_theta + at).to(tl.float32)" in text
    assert "x_theta = tl.load(p_theta + at, mask=at < count, other=0).to(tl.float32)" in text


@gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pull", PULLS, ids=repr)
@pytest.mark.parametrize("importance", IMPORTANCES, ids=repr)
def test_on_a_gpu_the_kernel_does_what_the_step_does(importance, pull, dtype, monkeypatch):
    def after(fused: bool) -> tuple[list[Tensor], mooring.Mooring]:
        monkeypatch.undo()
        if not fused:
            without_kernels(monkeypatch)
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 70), nn.ReLU(), nn.Linear(70, 3)]
        model = nn.Sequential(*layers).to("cuda", dtype).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        moor = mooring.attach(model, optimizer, importance=importance, pull=pull)
        for step in range(6):
            optimizer.zero_grad()
            x = torch.randn(4, 3, 8, 8, device="cuda", dtype=dtype)
            model(x).square().mean().backward()
            optimizer.step()
            if step in (1, 3):
                moor.consolidate()
        return [p.detach() for p in model.parameters()], moor

    (ours, moor), (theirs, other) = after(fused=True), after(fused=False)
    close = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=close, atol=close * float(two.abs().max()))
    for name, score in moor.previous.items():
        torch.testing.assert_close(score, other.previous[name], rtol=close, atol=close * float(score.abs().max()))


@gpu
def test_on_a_gpu_views_that_are_not_aligned_are_found_too():
    def rule(terms):
        terms["theta"].mul_(terms["times"])

    whole = torch.ones(10_000, device="cuda")
    parts = [whole[1:5000], whole[5003:5004], whole[5005:9999]]
    MultiTensorKernel(rule, {"theta": parts[0]}, ["times"], torch.float32)(
        Layout([{"theta": part} for part in parts]), {"times": [2.0, 3.0, 5.0]}
    )
    assert [sorted(set(part.tolist())) for part in parts] == [[2.0], [3.0], [5.0]]
    assert float(whole[0]) == float(whole[5000]) == float(whole[-1]) == 1.0


@gpu
@pytest.mark.parametrize("pull", [Budget(1e-6), Budget(3e-6), Budget(1e-6, every=2), Budget(1e3)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_a_budget_is_kept_by_kernels_as_without(pull, dtype, monkeypatch):
    """A smooth network: at the corner of a ReLU the rounding of the training alone would decide."""

    def after(fused: bool) -> tuple[list[Tensor], list[float]]:
        monkeypatch.undo()
        if not fused:
            without_kernels(monkeypatch)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(70, 300), nn.Tanh(), nn.Linear(300, 3)).to("cuda", dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        moor = mooring.attach(model, optimizer, pull=pull)
        energies = []
        for step in range(9):
            optimizer.zero_grad()
            model(torch.randn(4, 70, device="cuda", dtype=dtype)).square().mean().backward()
            optimizer.step()
            if step in (2, 5):
                moor.consolidate()
            energies.append(moor.pull_energy())
        return [p.detach() for p in model.parameters()], energies

    (ours, spent), (theirs, expected) = after(fused=True), after(fused=False)
    assert spent == pytest.approx(expected, rel=5e-3 if dtype != torch.bfloat16 else 5e-2)
    assert (spent[7] > 1.9 * pull.nats) == (pull.nats < 1)  # the small budgets are all spent, the large one is not
    close = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 3e-2}[dtype]
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=close, atol=close * float(two.abs().max()))
