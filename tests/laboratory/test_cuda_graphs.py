"""Steps are captured after a warm-up if enough of them are left; steps that cannot be captured run without a graph."""

import pytest
import torch

from mooring_lab.fleet.gpu.cuda_graphs import MIN_STEPS_LEFT, WARMUP_STEPS, GraphRecorder


class Graph:
    """A graph that counts its replays."""

    created: list["Graph"]

    def __init__(self) -> None:
        self.replays = 0
        Graph.created.append(self)

    def replay(self) -> None:
        self.replays += 1


class Capture:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _device(monkeypatch) -> None:
    Graph.created = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def run_steps(recorder: GraphRecorder, kinds: list[str], step) -> None:
    for number, kind in enumerate(kinds):
        recorder.run(kind, kinds[number:].count(kind), step)


def test_step_is_captured_after_the_warm_up_and_replayed():
    calls = []
    recorder = GraphRecorder(enabled=True)
    run_steps(recorder, ["full"] * 20, lambda: calls.append(1))
    assert len(calls) == WARMUP_STEPS + 1  # once more for the capture
    assert [graph.replays for graph in Graph.created] == [20 - WARMUP_STEPS]


def test_each_kind_of_step_has_its_own_graph_unless_it_is_rare():
    recorder = GraphRecorder(enabled=True)
    run_steps(recorder, ["full", "pulling"] * 12 + ["short"] * (MIN_STEPS_LEFT - 1), lambda: None)
    assert set(recorder.graphs) == {"full", "pulling"}


def test_clear_removes_the_graphs():
    recorder = GraphRecorder(enabled=True)
    run_steps(recorder, ["full"] * 20, lambda: None)
    recorder.clear()
    assert recorder.graphs == {}
    calls = []
    run_steps(recorder, ["full"] * 20, lambda: calls.append(1))
    assert len(calls) == WARMUP_STEPS + 1


def test_step_that_cannot_be_captured_still_runs_and_the_reason_is_kept():
    calls = []

    def step() -> None:
        calls.append(1)
        if len(calls) == WARMUP_STEPS + 1:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    recorder = GraphRecorder(enabled=True)
    run_steps(recorder, ["full"] * 20, step)
    assert len(calls) == 20 + 1  # each step, and the attempt
    assert recorder.failure == "operation not permitted when stream is capturing"
    assert not recorder.enabled


def test_out_of_memory_during_the_capture_is_raised():
    def step() -> None:
        if recorder.counts["full"] > WARMUP_STEPS:
            raise torch.OutOfMemoryError("CUDA out of memory")

    recorder = GraphRecorder(enabled=True)
    with pytest.raises(torch.OutOfMemoryError):
        run_steps(recorder, ["full"] * 20, step)


def test_disabled_recorder_captures_nothing():
    calls = []
    run_steps(GraphRecorder(enabled=False), ["full"] * 20, lambda: calls.append(1))
    assert len(calls) == 20
    assert Graph.created == []
