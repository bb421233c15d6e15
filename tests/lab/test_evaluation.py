"""What a fleet is scored on: the tasks so far and the next, of which every metric can be told; on the device."""

from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch

from lab.small import class_stream, domain_stream, spec_for
from mooring.lab.fleet import evaluation
from mooring.lab.fleet.evaluation import Evaluation, resident_bytes
from mooring.lab.fleet.fleet import Fleet
from mooring.lab.fleet.heads import evaluation_heads
from mooring.lab.fleet.stack.stack import Stack
from mooring.lab.networks.initialization import initial_network

STREAMS = {"classes": class_stream(tasks=4), "domains": domain_stream(tasks=4)}


class Square:
    """Scores every task after every task, whatever the fleet does."""

    def __init__(self) -> None:
        self.rows: list[list[list[float]]] = []

    def on_step(self, fleet: Fleet) -> None:
        pass

    def on_task_end(self, fleet: Fleet) -> None:
        heads = evaluation_heads(fleet.specs, fleet.stream, fleet.position.task - 1, 4)
        self.rows.append(fleet.evaluation.score(fleet.stack, heads, fleet.dtype).tolist())


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", ["plain", "ewc", "joint"])
def test_rows_go_to_the_next_task_and_metrics_are_those_of_the_whole_matrix(method, kind):
    stream, square = STREAMS[kind], Square()
    results = Fleet([spec_for(method, stream, seed, epochs=1) for seed in (0, 1)], stream).run(square)
    for run, result in enumerate(results):
        full = [rows[run] for rows in square.rows]
        assert [len(row) for row in full] == [4, 4, 4, 4] == [len(result.untrained)] * 4
        assert result.matrix == [full[0][:2], full[1][:3], full[2], full[3]]
        last = full[-1]
        by_hand = {
            "accuracy": sum(last) / 4,
            "forgetting": sum(max(row[k] for row in full[k:]) - last[k] for k in range(4)) / 4,
            "learned": sum(full[k][k] for k in range(4)) / 4,
            "backward": sum(last[k] - full[k][k] for k in range(3)) / 3,
            "forward": sum(full[k - 1][k] - result.untrained[k] for k in (1, 2, 3)) / 3,
        }
        assert result.metrics == pytest.approx(by_hand, rel=1e-12)
        assert replace(result, matrix=full).metrics == result.metrics  # as an older version wrote it, to the bit


def test_images_stay_on_the_device_where_they_fit_easily(monkeypatch):
    stream = STREAMS["classes"]
    assert resident_bytes(stream.test) == stream.test.images.nbytes
    kept = Evaluation(stream, "meta")
    assert {t.device.type for t in (kept.images, kept.labels, *kept.indices)} == {"meta"}
    monkeypatch.setattr(evaluation, "MAX_RESIDENT_BYTES", stream.test.images.nbytes)
    assert resident_bytes(stream.test) == 0
    left = Evaluation(stream, "meta")
    assert {t.device.type for t in (left.images, left.labels, *left.indices)} == {"cpu"}


def test_on_a_cpu_nothing_is_copied():
    stream = STREAMS["classes"]
    held = Evaluation(stream)
    assert held.images.data_ptr() == stream.test.images.data_ptr()
    assert held.labels.data_ptr() == stream.test.labels.data_ptr()


def test_scores_do_not_depend_on_how_many_images_are_scored_at_a_time(monkeypatch):
    stream = STREAMS["classes"]
    stack = Stack(
        [initial_network("mlp", stream, seed, dtype=torch.float64) for seed in (0, 1)], torch.device("cpu"), [0, 1]
    )
    whole = Evaluation(stream).score(stack, [0, 1, 1], torch.float64)
    monkeypatch.setitem(evaluation.PIXELS_PER_BATCH, "cpu", 2 * 64 * 7)  # seven images of each of two runs
    assert torch.equal(Evaluation(stream).score(stack, [0, 1, 1], torch.float64), whole)
    assert whole.shape == (2, 3)


def test_runs_that_start_from_the_same_are_scored_once_before_they_are_trained(monkeypatch):
    monkeypatch.setattr(evaluation, "_UNTRAINED_SCORES", WeakKeyDictionary())
    stream = STREAMS["classes"]
    specs = [spec_for(method, stream, seed, epochs=1) for method in ("plain", "ewc") for seed in (0, 1)]
    scored = []

    class Counting(Evaluation):
        def score(self, stack, *told):
            scored.append(len(stack))
            return super().score(stack, *told)

    fleet = Fleet(specs, stream)
    fleet.evaluation = Counting(stream)
    results = {(result.spec.method, result.spec.seed): result for result in fleet.run()}
    assert scored == [2, 4, 4, 4, 4]
    again = Fleet([replace(spec, lr=0.01) for spec in specs], stream)
    again.evaluation = Counting(stream)
    assert [each.untrained for each in again.run()] == [each.untrained for each in results.values()]
    assert scored[5:] == [4, 4, 4, 4]  # the first of these after a task
    for (method, seed), result in results.items():
        alone = Fleet([spec_for(method, stream, seed, epochs=1)], stream).run()[0]
        assert result.untrained == alone.untrained == results["plain", seed].untrained
    assert results["plain", 0].untrained != results["plain", 1].untrained
