"""Tests of docs/architecture.md: each formula of the paper is written once, and a training step is short to read."""

import ast
import gc
import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import mooring
from mooring.reference.pass_cost import MEASURING_INTERVAL

ROOT = Path(mooring.__file__).parent
PACKAGES = ("mooring", "mooring_lab", "mooring_paper")
PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"
MAX_FILES_OF_A_STEP = 7
MAX_FILES_OF_A_MEASURED_STEP = 19
MAX_FILES_OF_ATTACH = 42


def equation_rows() -> list[tuple[str, str, str]]:
    """Return number, function and pattern of each row of the page's table of equations."""
    rows = re.findall(r"^\| (Equation \d|Algorithm 1[^|]*) \| `([\w.]+)` \|[^|]*\| `(.+)` \|$", PAGE.read_text(), re.M)
    return [(number, function, pattern.replace("\\|", "|")) for number, function, pattern in rows]


@cache
def source_code() -> dict[str, str]:
    """Return the code of every module but the conformance suite, without docstrings and comments."""
    code = {}
    for path in (path for package in PACKAGES for path in (ROOT.parent / package).rglob("*.py")):
        if path.parent.name == "testing":
            continue  # the conformance suite compares with its own oracles
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                node.body = [n for n in body if not _is_text(n)] or [ast.Pass()]
        code[".".join(path.relative_to(ROOT.parent).with_suffix("").parts)] = ast.unparse(tree)
    return code


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def test_the_table_covers_equations_1_to_8_and_algorithm_1():
    numbers = [number for number, _, _ in equation_rows()]
    assert {f"Equation {n}" for n in range(1, 9)} <= set(numbers)
    assert sum(number.startswith("Algorithm 1") for number in numbers) == 5


@pytest.mark.parametrize(("number", "function", "pattern"), equation_rows(), ids=lambda value: value.split("`")[0])
def test_each_equation_is_implemented_by_one_function(number, function, pattern):
    module, _, name = function.rpartition(".")
    try:
        owner = import_module(module)
    except ModuleNotFoundError:  # a method of a class
        module, _, kind = module.rpartition(".")
        owner = getattr(import_module(module), kind)
    assert callable(getattr(owner, name))
    code = source_code()
    assert re.search(pattern, code[module]), f"{number}: {pattern} is not in {module}"
    places = [other for other, text in code.items() if re.search(pattern, text)]
    assert places == [module], f"{number} is also written in {places}"


def test_the_kernels_trace_the_rules_of_the_eager_backend():
    """The core's and the fleet's steps and kernels call the same functions, and nothing else interpolates."""
    callers = {
        "apply_penalty": {"mooring.backends.eager", "mooring_lab.fleet.fused_step", "mooring_lab.fleet.method_state"},
        "update_importance": {
            "mooring.backends.eager",
            "mooring_lab.fleet.fused_step",
            "mooring_lab.fleet.method_state",
        },
        "consolidate": {"mooring_lab.fleet.method_state"},
    }
    code = source_code()
    for function, modules in callers.items():
        for module in modules:
            assert re.search(rf"(?<!def )(?<!\.)\b{function}\(", code[module]), (function, module)


def files_passed(action: Callable[[], object]) -> set[str]:
    """Return the files of the library whose functions an action calls."""
    files: set[str] = set()

    def profile(frame, event, argument) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            files.add(Path(frame.f_code.co_filename).relative_to(ROOT).as_posix())

    gc.disable()  # finalizers of what other tests left are no part of it
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return files


def test_an_explicit_ewc_step_on_the_cpu_passes_through_at_most_seven_files():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="ewc")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()

    step()
    moor.consolidate()
    step()
    before = [p.detach().clone() for p in model.parameters()]
    files = files_passed(step)
    assert any(not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert {"step.py", "rules/ewc.py", "rules/interpolation.py"} <= files
    assert len(files) <= MAX_FILES_OF_A_STEP, sorted(files)


def test_the_default_with_a_reference_passes_through_few_files():
    """Its steps with AdamW distil; those that are multiples of 7 measure, too."""
    reference = [torch.randn(8, 3) for _ in range(6)]
    moors: list[mooring.Mooring] = []

    def attached() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        moors.append(mooring.attach(model, optimizer, reference=reference))
        return model, optimizer

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(5, 3)), torch.randint(2, (5,))).backward()
        optimizer.step()

    model, optimizer = attached()
    steps = [files_passed(step) for _ in range(2 * MEASURING_INTERVAL)]
    assert len(moors[0].measured_history) == 2
    assert len(steps[-1]) > len(steps[-2])  # it measures
    assert len(steps[-1]) <= MAX_FILES_OF_A_MEASURED_STEP, sorted(steps[-1])
    files = files_passed(attached)
    assert {"attachment.py", "reference/estimation.py", "hold/measured_budget.py"} <= files
    assert len(files) <= MAX_FILES_OF_ATTACH, sorted(files)
