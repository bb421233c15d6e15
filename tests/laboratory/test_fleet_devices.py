"""A fleet on a GPU, with captured steps, equals the fleet on the CPU to 1e-9 in float64."""

import pytest
import torch

from laboratory.small import class_stream, domain_stream, gpu, spec_for
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.methods import METHODS
from mooring_lab.model.known_methods import VARIANTS
from mooring_lab.model.spec import RunSpec
from mooring_lab.streams import Stream

pytestmark = gpu

STREAMS = {"classes": class_stream(tasks=3, images=125), "domains": domain_stream(tasks=2, images=125)}
EXACT = {"rtol": 1e-9, "atol": 1e-9}


class GraphCounts:
    """Records how many kinds of steps were captured, in each task."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def on_step(self, fleet: Fleet) -> None:
        self.counts[fleet.position.task] = len(fleet.recorder.graphs)

    def on_task_end(self, fleet: Fleet) -> None:
        pass


AS_PUBLISHED = [name for name in VARIANTS if name.endswith("-as-published")]


def run_on_both(specs: list[RunSpec], stream: Stream) -> list[Fleet]:
    """Run the fleet on the CPU and on the GPU, where steps of every task must be captured."""
    fleets = [Fleet(specs, stream, device=device) for device in ("cpu", "cuda")]
    fleets[0].run()
    graphs = GraphCounts()
    fleets[1].run(graphs)
    assert min(graphs.counts.values()) > 0 or fleets[1].stack.mode == "sequential"
    return fleets


def tensors(fleet: Fleet) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu() for name, t in {**fleet.stack.parameters, **fleet.stack.buffers}.items()}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", [*METHODS, "er-past", "er-2-updates", "a-gem-2-updates", *AS_PUBLISHED])
def test_weights_and_results_are_the_same_on_both(method: str, kind: str) -> None:
    stream = STREAMS[kind]
    cpu, cuda = run_on_both([spec_for(method, stream, seed, epochs=1) for seed in (0, 1)], stream)
    torch.testing.assert_close(tensors(cpu), tensors(cuda), **EXACT)
    for actual, expected in zip(cpu.measured.results, cuda.measured.results, strict=True):
        assert actual.status == expected.status
        assert actual.matrix == [pytest.approx(row) for row in expected.matrix]
        assert actual.losses == [pytest.approx(row) for row in expected.losses]
        assert actual.importance == pytest.approx(expected.importance)


@pytest.mark.parametrize("kind", STREAMS)
def test_fleet_of_several_methods_is_the_same_on_both(kind: str) -> None:
    stream = STREAMS[kind]
    methods = ["plain", "ewc", "si", "rwalk", "random", "explicit-ewc", "explicit-si", "proximal-ewc", "balanced-ewc"]
    methods += ["budget-ewc"]
    specs = [spec_for(method, stream, seed, epochs=2, lr=0.01 * (1 + seed)) for method in methods for seed in (0, 1)]
    cpu, cuda = run_on_both(specs, stream)
    torch.testing.assert_close(tensors(cpu), tensors(cuda), **EXACT)


def test_runs_with_different_hyperparameters_are_the_same_on_both() -> None:
    stream = STREAMS["classes"]
    settings = [(0.9, 0.0), (0.0, 0.0), (0.5, 0.01)]
    runs = [(method, momentum, decay) for method in ("plain", "ewc", "explicit-si") for momentum, decay in settings]
    specs = [spec_for(method, stream, 0, epochs=1, momentum=m, weight_decay=decay) for method, m, decay in runs]
    cpu, cuda = run_on_both(specs, stream)
    torch.testing.assert_close(tensors(cpu), tensors(cuda), **EXACT)


@pytest.mark.parametrize(
    "network",
    [
        "laboratory.test_fleet:normalised",
        "laboratory.test_fleet:convolving",
        "laboratory.test_fleet:scaling",
        "cnn6",
        "resnet18-third",
    ],
)
def test_other_networks_are_the_same_on_both(network: str) -> None:
    stream = class_stream(tasks=2, images=100)
    cpu, cuda = run_on_both([spec_for("ewc", stream, seed, epochs=1, network=network) for seed in (0, 1, 2)], stream)
    torch.testing.assert_close(tensors(cpu), tensors(cuda), **EXACT)


@pytest.mark.parametrize("network", ["laboratory.test_fleet:normalised", "laboratory.test_fleet:convolving", "cnn6"])
def test_distillation_of_other_networks_is_the_same_on_both(network: str) -> None:
    stream = class_stream(tasks=2, images=100)
    specs = [spec_for("distil", stream, seed, epochs=1, network=network, strength=0.3) for seed in (0, 1)]
    cpu, cuda = run_on_both(specs, stream)
    torch.testing.assert_close(tensors(cpu), tensors(cuda), **EXACT)


@pytest.mark.parametrize("method", ["plain", "explicit-mas", "er"])
def test_run_fails_in_the_same_step_on_both_and_the_others_continue(method: str) -> None:
    stream = STREAMS["classes"]
    specs = [spec_for(method, stream, seed, epochs=1, lr=lr) for seed, lr in ((0, 0.01), (1, 1e200), (2, 0.01))]
    cpu, cuda = run_on_both(specs, stream)
    torch.testing.assert_close(tensors(cpu), tensors(cuda), **EXACT)
    outcomes = [
        sorted((result.spec.seed, result.status, result.reason) for result in f.measured.results) for f in (cpu, cuda)
    ]
    assert outcomes[0] == outcomes[1]
    assert [status for _, status, _ in outcomes[1]] == ["finished", "unstable", "finished"]


@pytest.mark.parametrize("method", ["explicit-ewc", "si", "er", "a-gem", "distil", "budget-distil"])
def test_fleet_resumed_in_a_captured_task_equals_uninterrupted(method: str, tmp_path) -> None:
    from mooring_lab.fleet import checkpoint

    stream = STREAMS["classes"]
    specs = [spec_for(method, stream, seed, epochs=2) for seed in (0, 1)]

    class StopError(Exception):
        pass

    class Stopper:
        def on_step(self, fleet: Fleet) -> None:
            if (fleet.position.task, fleet.position.epoch, fleet.position.step) == (1, 1, 7):
                checkpoint.save(fleet, tmp_path / "fleet.safetensors")
                raise StopError

        def on_task_end(self, fleet: Fleet) -> None:
            pass

    whole = Fleet(specs, stream, device="cuda")
    whole.run()
    with pytest.raises(StopError):
        Fleet(specs, stream, device="cuda").run(Stopper())
    resumed = Fleet(specs, stream, device="cuda")
    checkpoint.restore(resumed, tmp_path / "fleet.safetensors")
    resumed.run()
    torch.testing.assert_close(tensors(whole), tensors(resumed), **EXACT)
    assert [r.matrix for r in whole.measured.results] == [r.matrix for r in resumed.measured.results]
