"""MIR in a fleet equals a plain loop that takes the virtual step on a copy of the network."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from laboratory.small import class_stream, domain_stream, growing_stream, spec_for
from laboratory.test_reference_methods import StopAt, StopError
from laboratory.test_replay import Loop
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.fleet_callback import Position
from mooring_lab.methods import find_method

EXACT = {"rtol": 1e-9, "atol": 1e-9}
STREAMS = {"classes": class_stream(), "domains": domain_stream(), "growing": growing_stream()}


def normalised(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU())


class InterferedLoop(Loop):
    """A loop over one network that asks for each candidate alone how much its loss would rise."""

    def __init__(self, spec, stream) -> None:
        super().__init__(replace(spec, method="er"), stream)
        self.spec, self.unlike_the_first = spec, 0

    def rises(self, batch: torch.Tensor, candidates: torch.Tensor) -> list[float]:
        model = self.model.eval()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(self.loss(batch, self.heads(batch)), parameters, allow_unused=True)
        stepped = deepcopy(model)
        with torch.no_grad():
            for p, g in zip(stepped.parameters(), gradients, strict=True):
                p -= self.spec.lr * (0 if g is None else g)
            losses = []
            for self.model in (model, stepped):
                losses.append([float(self.loss(one, self.heads(one))) for one in candidates.split(1)])
        self.model = model.train()
        return [after - before for before, after in zip(*losses, strict=True)]

    def update(self, batch: torch.Tensor, number: int, optimizer: torch.optim.Optimizer) -> None:
        both = batch
        if self.memory.kept:
            candidates = self.memory.sample(find_method("mir").plugin.recalls)
            rises = self.rises(batch, candidates)
            ranked = sorted(range(len(candidates)), key=lambda place: -rises[place])
            both = torch.cat([batch, candidates[ranked[: len(batch)]]])
            self.unlike_the_first += sorted(ranked[: len(batch)]) != list(range(len(batch)))
        optimizer.zero_grad()
        self.loss(both, self.heads(both)).backward()
        optimizer.step()


@pytest.mark.parametrize("network", ["mlp", "laboratory.test_mir:normalised"])
@pytest.mark.parametrize("kind", STREAMS)
def test_mir_in_a_fleet_equals_a_plain_loop(kind, network):
    stream = STREAMS[kind]
    specs = [spec_for("mir", stream, seed, lr=0.02 * (seed + 1), memory=30, network=network) for seed in (2, 0)]
    fleet = Fleet(specs, stream)
    order = list(fleet.specs)
    fleet.run()
    for row, spec in enumerate(order):
        loop = InterferedLoop(spec, stream).train()
        torch.testing.assert_close(fleet.stack.network_of(row).state_dict(), loop.model.state_dict(), **EXACT)
        assert loop.unlike_the_first > 0


@pytest.mark.parametrize("position", [Position(0, 1, 2), Position(1), Position(2, 1, 3)], ids=str)
def test_interrupted_mir_equals_one_that_was_not(position, tmp_path):
    stream = STREAMS["classes"]
    specs = [spec_for("mir", stream, seed, memory=30) for seed in (0, 1)]
    with pytest.raises(StopError):
        Fleet(specs, stream).run(StopAt(tmp_path / "fleet", position))
    whole, resumed = Fleet(specs, stream), Fleet(specs, stream)
    checkpoint.restore(resumed, tmp_path / "fleet")
    for fleet in (whole, resumed):
        fleet.run()
    for row in range(len(specs)):
        expected = whole.stack.network_of(row).state_dict()
        torch.testing.assert_close(resumed.stack.network_of(row).state_dict(), expected, rtol=0, atol=0)
