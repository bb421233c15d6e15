"""Tests that Avalanche's strategies with a MooringPlugin equal a plain loop."""

import doctest
import pickle

import pytest
import torch
from torch import nn

import mooring

pytestmark = pytest.mark.filterwarnings("ignore")  # its own imports cause deprecation warnings


@pytest.fixture(scope="module")
def avalanche():
    """Return the package, or skip: it has many dependencies that this repository does not need."""
    pytest.importorskip("torchvision", reason="avalanche-lib needs torchvision", exc_type=ImportError)
    pytest.importorskip("avalanche", reason="needs avalanche-lib", exc_type=ImportError)
    import avalanche.benchmarks
    import avalanche.training.plugins

    return avalanche


def network() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def experience(task: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(task), dtype=torch.float64)
    return x, x.argmax(1) % 3


def strategy_of(avalanche, model: nn.Module, plugin, momentum: float = 0.9):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum)
    options = {"train_mb_size": 4, "train_epochs": 3, "evaluator": avalanche.training.plugins.EvaluationPlugin()}
    return avalanche.training.Naive(model=model, optimizer=optimizer, plugins=[plugin], **options)


def stream_of(avalanche, tasks: int):
    tensors = [experience(task) for task in range(tasks)]
    return avalanche.benchmarks.tensors_benchmark(tensors, tensors, task_labels=[0] * tasks).train_stream


@pytest.mark.parametrize("importance", ["ewc", "mas", "si"])
def test_strategy_equals_a_plain_loop(importance, avalanche):
    from mooring.integrations.avalanche import MooringPlugin

    model, plugin = network(), MooringPlugin(importance=importance)
    strategy = strategy_of(avalanche, model, plugin)
    for experience in stream_of(avalanche, 3):
        strategy.train(experience, shuffle=False)
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.3, momentum=0.9)
    moor = mooring.attach(alone, optimizer, importance=importance)
    for task in range(3):
        x, y = experience(task)
        for _ in range(3):
            for rows in torch.arange(12).split(4):
                optimizer.zero_grad()
                nn.functional.cross_entropy(alone(x[rows]), y[rows]).backward()
                optimizer.step()
        moor.consolidate()
    torch.testing.assert_close(model.state_dict(), alone.state_dict(), rtol=1e-12, atol=1e-12)
    assert plugin.moor.tasks == 3


def test_strategy_resumes_from_avalanches_checkpoints(avalanche):
    from mooring.integrations.avalanche import MooringPlugin

    ends = []
    for interrupted in (False, True):
        model, plugin = network(), MooringPlugin(importance="si")
        strategy = strategy_of(avalanche, model, plugin, momentum=0.0)
        for experience in stream_of(avalanche, 3):
            strategy.train(experience, shuffle=False)
            if interrupted and plugin.moor.tasks < 3:
                model, plugin = pickle.loads(pickle.dumps((model, plugin)))  # its checkpoints pickle the strategy
                strategy = strategy_of(avalanche, model, plugin, momentum=0.0)
        assert plugin.moor.tasks == 3
        ends.append(model.state_dict())
    torch.testing.assert_close(*ends, rtol=0, atol=0)


def test_plugin_example_runs(avalanche):
    import mooring.integrations.avalanche as module

    results = doctest.testmod(module)
    assert results.attempted > 5
    assert results.failed == 0
