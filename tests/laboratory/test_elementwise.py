"""A rule written out as a kernel does what the rule does: on a GPU, for every importance and pull."""

import pytest
import torch
from torch import Tensor

from laboratory.small import gpu
from mooring.rules import (
    EWC,
    MAS,
    SI,
    Blend,
    GradientPull,
    Importance,
    Interpolation,
    Iteration,
    ParameterPull,
    Penalty,
    Proximal,
    Pull,
    Random,
    RWalk,
    Uniform,
)
from mooring_lab.fleet.gpu.run_kernel import NEVER, RunKernel, run_kernel_source

SIGNED = [SI(), SI(sign="signed"), SI(sign=0.3), SI(sign="flipped")]
RISING = [SI(path="rising", damping=1e-10), RWalk(path="rising", damping=1e-10)]
IMPORTANCES = [EWC(), EWC(decay=None), MAS(), *SIGNED, RWalk(), *RISING, Uniform(), Random()]
PULLS: list[Pull] = [Interpolation(), Interpolation(root=3, stiffness=0.5), Interpolation(returns=True), Blend(0.3)]
PULLS += [Penalty(2.0), Penalty(2.0, clamp=True), Proximal(3.0)]


def rule_of(importance: Importance, pull: Pull):
    def rule(terms: dict[str, Tensor]) -> None:
        theta, g, anchor, previous, lr = (terms[name] for name in ("theta", "g", "anchor", "previous", "lr"))
        if isinstance(pull, GradientPull):
            g = g + pull.force(previous, theta - anchor, lr)
        before = theta.clone()
        theta.sub_(lr.reshape(-1, 1) * g)
        state = {name.removeprefix("state_"): terms[name] for name in terms if name.startswith("state_")}
        importance.update(state, Iteration(terms["g"], theta, anchor, before, terms["probe"], 10, terms["count"]))
        if isinstance(pull, ParameterPull):
            theta.lerp_(anchor, pull.rate(previous, state["current"], lr))

    return rule


def tensors(importance: Importance, dtype: torch.dtype, device: str = "cpu", count: int = 1500) -> dict[str, Tensor]:
    torch.manual_seed(0)
    runs = 2
    terms = {name: torch.rand(runs, count, dtype=dtype) for name in ("theta", "g", "anchor", "previous", "probe")}
    terms["g"] -= 0.5
    terms["previous"][0, :5] = 0
    terms |= {"lr": torch.rand(runs, dtype=dtype), "count": torch.tensor(3.0, dtype=dtype)}
    for slot, tensor in importance.start(terms["theta"][0], name="weight", task=0).items():
        whole = tensor.expand(runs, *tensor.shape) if tensor.ndim else tensor.expand(runs, 1)
        terms[f"state_{slot}"] = whole.clone() if whole.dtype == torch.bool else whole + (slot == "fisher")
    return {name: tensor.to(device).contiguous() for name, tensor in terms.items()}


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("pull", PULLS, ids=repr)
@pytest.mark.parametrize("importance", IMPORTANCES, ids=repr)
def test_a_written_rule_does_what_the_rule_does(importance, pull, dtype):
    terms = tensors(importance, dtype, "cuda")
    copies, rule = {name: tensor.clone() for name, tensor in terms.items()}, rule_of(importance, pull)
    bad, now = torch.full((2,), NEVER, device="cuda"), torch.tensor([17], device="cuda")
    RunKernel(rule, terms, ["g"])(copies, bad, now)
    rule(terms)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    for name, tensor in terms.items():
        torch.testing.assert_close(copies[name], tensor, **close)
    assert bad.tolist() == [NEVER, NEVER]


@gpu
def test_the_first_step_at_which_a_run_was_not_finite_is_written_down():
    terms = tensors(EWC(), torch.float32, "cuda", count=5000)
    kernel = RunKernel(rule_of(EWC(), Interpolation()), terms, ["g"])
    bad = torch.full((2,), NEVER, device="cuda")
    for step, value in ((3, 1.0), (4, float("nan")), (5, float("inf"))):
        terms["g"][1, 4321] = value
        kernel(terms, bad, torch.tensor([step], device="cuda"))
    assert bad.tolist() == [NEVER, 4]


@pytest.mark.parametrize("pull", PULLS, ids=repr)
@pytest.mark.parametrize("importance", IMPORTANCES, ids=repr)
def test_every_rule_of_ours_can_be_written(importance, pull):
    assert "tl.store(p_theta" in run_kernel_source(rule_of(importance, pull), tensors(importance, torch.float32), ["g"])


def test_a_rule_that_cannot_be_written_is_done_one_operation_after_the_other():
    def rule(terms: dict[str, Tensor]) -> None:
        terms["theta"].add_(terms["g"].cumsum(1))

    terms = {"theta": torch.zeros(2, 3), "g": torch.ones(2, 3)}
    bad = torch.full((2,), NEVER)
    kernel = RunKernel(rule, terms, ["g"])
    kernel(terms, bad, torch.tensor([5]))
    assert terms["theta"].tolist() == [[1, 2, 3], [1, 2, 3]]
    terms["g"][1, 2] = float("inf")
    for step in (6, 7):
        kernel(terms, bad, torch.tensor([step]))
    assert bad.tolist() == [NEVER, 6]


def test_numbers_of_a_run_are_read_once_for_the_run_and_elements_one_by_one():
    text = run_kernel_source(rule_of(EWC(), Penalty(2.0)), tensors(EWC(), torch.float32), ["g"])
    assert "x_lr = tl.load(p_lr + run)" in text
    assert "x_theta = tl.load(p_theta + row, mask=there, other=0)" in text
    assert "probe" not in text.split(":\n", 1)[1]  # what a rule does not read is not loaded


def test_in_float64_numbers_are_written_in_full():
    assert "tl.full((), 2.0, tl.float64)" in run_kernel_source(
        rule_of(EWC(), Penalty(2.0)), tensors(EWC(), torch.float64)
    )


def test_what_cannot_be_written_is_said():
    def rule(terms):
        terms["theta"].copy_(terms["theta"].cumsum(1))

    with pytest.raises(NotImplementedError, match="cumsum"):
        run_kernel_source(rule, {"theta": torch.ones(2, 3)})


def test_a_rule_may_not_read_tensors_that_it_was_not_given():
    hidden = torch.ones(2, 1)

    def rule(terms):
        terms["theta"].mul_(hidden)

    with pytest.raises(NotImplementedError, match="not one of its tensors"):
        run_kernel_source(rule, {"theta": torch.ones(2, 3)})
