"""A fleet on a GPU, its steps recorded, gives what it gives on the CPU, to 1e-9 in float64."""

import pytest
import torch

from lab.small import class_stream, domain_stream, gpu, spec_for
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.methods import METHODS
from mooring.lab.model.spec import RunSpec
from mooring.lab.streams import Stream

pytestmark = gpu

STREAMS = {"classes": class_stream(tasks=3, images=125), "domains": domain_stream(tasks=2, images=125)}
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


class Recorded:
    """How many kinds of steps were played back, in each task."""

    def __init__(self) -> None:
        self.kinds: dict[int, int] = {}

    def on_step(self, fleet: Fleet) -> None:
        self.kinds[fleet.position.task] = len(fleet.recorder.graphs)

    def on_task_end(self, fleet: Fleet) -> None:
        pass


def on_both(specs: list[RunSpec], stream: Stream) -> list[Fleet]:
    """The fleet sailed on the CPU, and on the GPU, where every task must have been recorded."""
    fleets = [Fleet(specs, stream, device=device) for device in ("cpu", "cuda")]
    fleets[0].run()
    seen = Recorded()
    fleets[1].run(seen)
    assert min(seen.kinds.values()) > 0 or fleets[1].stack.mode == "sequential"
    return fleets


def tensors(fleet: Fleet) -> dict[str, torch.Tensor]:
    return {name: t.detach().cpu() for name, t in {**fleet.stack.parameters, **fleet.stack.buffers}.items()}


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", METHODS)
def test_the_same_weights_and_results_on_both(method: str, kind: str) -> None:
    stream = STREAMS[kind]
    one, other = on_both([spec_for(method, stream, seed, epochs=1) for seed in (0, 1)], stream)
    torch.testing.assert_close(tensors(one), tensors(other), **CLOSE)
    for mine, theirs in zip(one.results, other.results, strict=True):
        assert mine.status == theirs.status
        assert mine.matrix == [pytest.approx(row) for row in theirs.matrix]
        assert mine.losses == [pytest.approx(row) for row in theirs.losses]
        assert mine.importance == pytest.approx(theirs.importance)


@pytest.mark.parametrize("kind", STREAMS)
def test_methods_that_sail_together_too(kind: str) -> None:
    stream = STREAMS[kind]
    methods = ["plain", "ewc", "si", "rwalk", "random", "explicit-ewc", "explicit-si", "proximal-ewc", "balanced-ewc"]
    methods += ["budget-ewc"]
    specs = [spec_for(method, stream, seed, epochs=2, lr=0.01 * (1 + seed)) for method in methods for seed in (0, 1)]
    one, other = on_both(specs, stream)
    torch.testing.assert_close(tensors(one), tensors(other), **CLOSE)


def test_runs_with_numbers_of_their_own_too() -> None:
    stream = STREAMS["classes"]
    numbers = [(0.9, 0.0), (0.0, 0.0), (0.5, 0.01)]
    told = [(method, momentum, decay) for method in ("plain", "ewc", "explicit-si") for momentum, decay in numbers]
    specs = [spec_for(method, stream, 0, epochs=1, momentum=m, weight_decay=decay) for method, m, decay in told]
    one, other = on_both(specs, stream)
    torch.testing.assert_close(tensors(one), tensors(other), **CLOSE)


@pytest.mark.parametrize(
    "network",
    ["lab.test_fleet:normalised", "lab.test_fleet:convolving", "lab.test_fleet:scaling", "cnn6", "resnet18-third"],
)
def test_other_networks_too(network: str) -> None:
    stream = class_stream(tasks=2, images=100)
    one, other = on_both([spec_for("ewc", stream, seed, epochs=1, network=network) for seed in (0, 1, 2)], stream)
    torch.testing.assert_close(tensors(one), tensors(other), **CLOSE)


@pytest.mark.parametrize("method", ["plain", "explicit-mas", "er"])
def test_a_run_that_is_lost_is_lost_in_the_same_step_and_the_others_go_on(method: str) -> None:
    stream = STREAMS["classes"]
    specs = [spec_for(method, stream, seed, epochs=1, lr=lr) for seed, lr in ((0, 0.01), (1, 1e200), (2, 0.01))]
    one, other = on_both(specs, stream)
    torch.testing.assert_close(tensors(one), tensors(other), **CLOSE)
    told = [sorted((result.spec.seed, result.status, result.reason) for result in f.results) for f in (one, other)]
    assert told[0] == told[1]
    assert [status for _, status, _ in told[1]] == ["finished", "unstable", "finished"]


@pytest.mark.parametrize("method", ["explicit-ewc", "si", "er", "a-gem"])
def test_stopped_in_a_recorded_task_and_continued_equals_never_stopped(method: str, tmp_path) -> None:
    from mooring.lab.fleet import checkpoint

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
    rest = Fleet(specs, stream, device="cuda")
    checkpoint.restore(rest, tmp_path / "fleet.safetensors")
    rest.run()
    torch.testing.assert_close(tensors(whole), tensors(rest), **CLOSE)
    assert [r.matrix for r in whole.results] == [r.matrix for r in rest.results]
