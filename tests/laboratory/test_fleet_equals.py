"""A run in a fleet equals the run alone, and both equal a hand-written loop with `mooring.attach`."""

import pytest
import torch

from laboratory.small import class_stream, domain_stream, growing_stream, spec_for, trained_by_hand
from mooring.errors import MooringError
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.grouping import fleet_shape
from mooring_lab.methods import METHODS
from mooring_lab.model.scenarios import SCENARIOS

ELSEWHERE = ("lwf", "laplace-kronecker", "clamped-laplace-kronecker", "gpm", "nscl", "owm", "ftp")
"""Methods that `attach` does not have; tests of their own compare them with loops."""

BY_HAND = [name for name, method in METHODS.items() if method.memory is None and name not in ELSEWHERE]
STREAMS = {"classes": class_stream(), "domains": domain_stream(), "growing": growing_stream()}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
NEED_LAYERS = ("gpm", "nscl", "owm")


def final(fleet: Fleet) -> dict[str, dict[str, torch.Tensor]]:
    """The final weights of each run, by its key."""
    specs = list(fleet.specs)
    fleet.run()
    return {spec.key: fleet.stack.network_of(row).state_dict() for row, spec in enumerate(specs)}


def test_methods_are_compared_in_every_scenario() -> None:
    assert {stream.scenario for stream in STREAMS.values()} == {*SCENARIOS}
    assert all({*method.scenarios} <= {*SCENARIOS} for method in METHODS.values())


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", BY_HAND)
def test_a_fleet_of_one_gives_what_a_hand_written_loop_with_attach_gives(method: str, kind: str) -> None:
    stream = STREAMS[kind]
    spec = spec_for(method, stream, seed=3)
    if stream.scenario not in METHODS[method].scenarios:
        with pytest.raises(MooringError, match="is not defined in the"):
            Fleet([spec], stream)
        return
    torch.testing.assert_close(
        final(Fleet([spec], stream))[spec.key], trained_by_hand(spec, stream).state_dict(), **EXACT
    )


NETWORKS = ["mlp", "laboratory.test_fleet_equals:normalised", "laboratory.test_fleet_equals:dropping"]
ALONE_AND_TOGETHER = [
    pytest.param(kind, network, marks=[pytest.mark.faults] if number and network != "mlp" else [])  # slow
    for number, kind in enumerate(STREAMS)
    for network in NETWORKS
]


@pytest.mark.filterwarnings("ignore:the budget of .* runs of budget-:mooring.errors.UnheldWarning")  # batch norm
@pytest.mark.parametrize(("kind", "network"), ALONE_AND_TOGETHER)
def test_a_run_alone_equals_the_run_in_a_fleet_of_all_methods(kind: str, network: str) -> None:
    stream = STREAMS[kind]
    specs = [
        spec_for(name, stream, seed, lr=0.01 * (seed + 1), network=network, epochs=1)
        for name, method in METHODS.items()
        for seed in (0, 1)
        if stream.scenario in method.scenarios
        if network != "laboratory.test_fleet_equals:dropping" or not (method.observes_layers or name in NEED_LAYERS)
    ]
    fleets: dict[tuple[object, ...], list] = {}
    for spec in specs:
        fleets.setdefault(fleet_shape(spec), []).append(spec)
    layers = network != "laboratory.test_fleet_equals:dropping"
    # plain, frozen, frozen after first, joint, outputs, er, mir, a-gem, distil, mooring, lwf, der++, ftp, tpgm;
    # and six with layers
    assert len(fleets) == 14 + 6 * layers
    for fleet in fleets.values():
        together = final(Fleet(fleet, stream))
        for spec in fleet[:: max(1, len(fleet) // 4)]:
            torch.testing.assert_close(final(Fleet([spec], stream))[spec.key], together[spec.key], **EXACT)


@pytest.mark.parametrize("method", ["plain", "ewc", "explicit-mas"])
def test_runs_with_numbers_of_their_own_train_together(method: str) -> None:
    stream = STREAMS["classes"]
    numbers = [(0.9, 0.0), (0.0, 0.0), (0.5, 0.01), (0.9, 0.1)]
    specs = [
        spec_for(method, stream, 0, momentum=momentum, weight_decay=decay, epochs=1) for momentum, decay in numbers
    ]
    judged = {
        result.spec.key: [verdict.diverge for verdict in result.stability] for result in Fleet(specs, stream).run()
    }
    together = final(Fleet(specs, stream))
    for spec in specs:
        torch.testing.assert_close(together[spec.key], trained_by_hand(spec, stream).state_dict(), **EXACT)
        alone = [verdict.diverge for verdict in Fleet([spec], stream).run()[0].stability]
        assert judged[spec.key] == alone, "momentum moves the limit beyond which a penalty diverges"


@pytest.mark.parametrize("kind", STREAMS)
def test_runs_with_fresh_heads_train_with_others(kind: str) -> None:
    stream = STREAMS[kind]
    kinds = [("plain", "fresh"), ("plain", "inherit"), ("ewc", "inherit"), ("ewc", "fresh")]
    specs = [spec_for(method, stream, seed, heads=heads, epochs=1) for method, heads in kinds for seed in (0, 1)]
    results = {result.spec.key: result for result in Fleet(specs, stream).run()}
    together = final(Fleet(specs, stream))
    for spec in specs:
        torch.testing.assert_close(together[spec.key], trained_by_hand(spec, stream).state_dict(), **EXACT)
        (alone,) = Fleet([spec], stream).run()
        result = results[spec.key]
        assert (result.untrained, result.matrix) == (alone.untrained, alone.matrix)


def test_factors_of_layers_that_cannot_be_seen_are_refused_in_one_line() -> None:
    stream = STREAMS["classes"]
    spec = spec_for("budget-kronecker", stream, 0, network="laboratory.test_fleet_equals:dropping")
    with pytest.raises(MooringError, match="needs layers that can be batched over runs") as refusal:
        Fleet([spec], stream)
    assert "\n" not in str(refusal.value)


def normalised(shape: tuple[int, int, int]) -> torch.nn.Module:
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 12), nn.ReLU()
    )


def dropping(shape: tuple[int, int, int]) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.ReLU(), torch.nn.Dropout(0.2))
