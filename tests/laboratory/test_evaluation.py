"""Evaluation of a fleet: the tasks so far and the next one, which every metric can be computed from."""

import math
from dataclasses import replace
from weakref import WeakKeyDictionary

import pytest
import torch

from laboratory.small import class_stream, domain_stream, spec_for
from mooring_lab.fleet import evaluation
from mooring_lab.fleet.evaluation import Evaluation, evaluation_heads, resident_bytes
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.stack.stack import Stack
from mooring_lab.networks.initialization import initial_network

STREAMS = {"classes": class_stream(tasks=4), "domains": domain_stream(tasks=4)}


class FullMatrix:
    """Evaluates every task after every task, in addition to what the fleet evaluates."""

    def __init__(self) -> None:
        self.rows: list[list[list[float]]] = []

    def on_step(self, fleet: Fleet) -> None:
        pass

    def on_task_end(self, fleet: Fleet) -> None:
        heads = evaluation_heads(fleet.specs, fleet.stream, fleet.position.task - 1, 4)
        self.rows.append(fleet.measured.evaluation.score(fleet.stack, heads, fleet.dtype).tolist())


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", ["plain", "ewc", "joint"])
def test_rows_include_the_next_task_and_metrics_equal_those_of_the_full_matrix(method, kind):
    stream, matrix = STREAMS[kind], FullMatrix()
    results = Fleet([spec_for(method, stream, seed, epochs=1) for seed in (0, 1)], stream).run(matrix)
    for run, result in enumerate(results):
        full = [rows[run] for rows in matrix.rows]
        assert [len(row) for row in full] == [4, 4, 4, 4] == [len(result.untrained)] * 4
        assert result.matrix == [full[0][:2], full[1][:3], full[2], full[3]]
        last = full[-1]
        by_hand = {
            "accuracy": sum(last) / 4,
            "incremental": sum(sum(full[i][: i + 1]) / (i + 1) for i in range(4)) / 4,
            "forgetting_earlier": sum(max(row[k] for row in full[k:3]) - last[k] for k in range(3)) / 3,
            "forgetting": sum(max(row[k] for row in full[k:]) - last[k] for k in range(4)) / 4,
            "learned": sum(full[k][k] for k in range(4)) / 4,
            "backward": sum(last[k] - full[k][k] for k in range(3)) / 3,
            "forward": sum(full[k - 1][k] - result.untrained[k] for k in (1, 2, 3)) / 3,
        }
        if method == "joint":  # it learns every task all the time
            assert result.joint == last
            by_hand = {name: value if name == "accuracy" else math.nan for name, value in by_hand.items()}
        assert result.metrics == pytest.approx(by_hand, rel=1e-12, nan_ok=True)
        older = replace(result, matrix=full).metrics  # as an older version wrote it, to the bit
        assert older == pytest.approx(result.metrics, rel=0, abs=0, nan_ok=True)


def test_small_test_sets_stay_on_the_device(monkeypatch):
    stream = STREAMS["classes"]
    assert resident_bytes(stream.test) == stream.test.images.nbytes
    resident = Evaluation(stream, "meta")
    assert {t.device.type for t in (resident.images, resident.labels, *resident.indices)} == {"meta"}
    monkeypatch.setattr(evaluation, "MAX_RESIDENT_BYTES", stream.test.images.nbytes)
    assert resident_bytes(stream.test) == 0
    on_host = Evaluation(stream, "meta")
    assert {t.device.type for t in (on_host.images, on_host.labels, *on_host.indices)} == {"cpu"}


def test_cpu_evaluation_does_not_copy_images():
    stream = STREAMS["classes"]
    shared = Evaluation(stream)
    assert shared.images.data_ptr() == stream.test.images.data_ptr()
    assert shared.labels.data_ptr() == stream.test.labels.data_ptr()


def test_scores_do_not_depend_on_the_batch_size(monkeypatch):
    stream = STREAMS["classes"]
    stack = Stack(
        [initial_network("mlp", stream, seed, dtype=torch.float64) for seed in (0, 1)], torch.device("cpu"), [0, 1]
    )
    whole = Evaluation(stream).score(stack, [0, 1, 1], torch.float64)
    monkeypatch.setitem(evaluation.PIXELS_PER_BATCH, "cpu", 2 * 64 * 7)  # seven images of each of two runs
    assert torch.equal(Evaluation(stream).score(stack, [0, 1, 1], torch.float64), whole)
    assert whole.shape == (2, 3)


def test_initial_networks_are_evaluated_once(monkeypatch):
    monkeypatch.setattr(evaluation, "_UNTRAINED_SCORES", WeakKeyDictionary())
    stream = STREAMS["classes"]
    specs = [spec_for(method, stream, seed, epochs=1) for method in ("plain", "ewc") for seed in (0, 1)]
    evaluated = []

    class Counting(Evaluation):
        def score(self, stack, *args):
            evaluated.append(len(stack))
            return super().score(stack, *args)

    fleet = Fleet(specs, stream)
    fleet.measured.evaluation = Counting(stream)
    results = {(result.spec.method, result.spec.seed): result for result in fleet.run()}
    assert evaluated == [2, 4, 4, 4, 4]
    again = Fleet([replace(spec, lr=0.01) for spec in specs], stream)
    again.measured.evaluation = Counting(stream)
    assert [result.untrained for result in again.run()] == [result.untrained for result in results.values()]
    assert evaluated[5:] == [4, 4, 4, 4]  # all of them after a task
    for (method, seed), result in results.items():
        alone = Fleet([spec_for(method, stream, seed, epochs=1)], stream).run()[0]
        assert result.untrained == alone.untrained == results["plain", seed].untrained
    assert results["plain", 0].untrained != results["plain", 1].untrained
