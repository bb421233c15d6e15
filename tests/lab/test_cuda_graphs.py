"""Steps are recorded once they are warm and often enough; what cannot be recorded goes on being told."""

import pytest
import torch

from mooring.lab.fleet.gpu.cuda_graphs import MIN_STEPS_LEFT, WARMUP_STEPS, GraphRecorder


class Graph:
    """A recording that remembers how often it was played."""

    made: list["Graph"]

    def __init__(self) -> None:
        self.played = 0
        Graph.made.append(self)

    def replay(self) -> None:
        self.played += 1


class Recording:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def __enter__(self) -> None:
        pass

    def __exit__(self, *told: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _device(monkeypatch) -> None:
    Graph.made = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def taken(recorder: GraphRecorder, kinds: list[str], step) -> None:
    for number, kind in enumerate(kinds):
        recorder.run(kind, kinds[number:].count(kind), step)


def test_a_kind_of_step_is_told_twice_then_recorded_and_played():
    told = []
    recorder = GraphRecorder(enabled=True)
    taken(recorder, ["full"] * 20, lambda: told.append(1))
    assert len(told) == WARMUP_STEPS + 1  # once more while it is recorded
    assert [graph.played for graph in Graph.made] == [20 - WARMUP_STEPS]


def test_each_kind_has_a_recording_of_its_own_and_rare_kinds_have_none():
    recorder = GraphRecorder(enabled=True)
    taken(recorder, ["full", "pulling"] * 12 + ["short"] * (MIN_STEPS_LEFT - 1), lambda: None)
    assert set(recorder.graphs) == {"full", "pulling"}


def test_what_was_recorded_is_forgotten_when_asked_to():
    recorder = GraphRecorder(enabled=True)
    taken(recorder, ["full"] * 20, lambda: None)
    recorder.clear()
    assert recorder.graphs == {}
    told = []
    taken(recorder, ["full"] * 20, lambda: told.append(1))
    assert len(told) == WARMUP_STEPS + 1


def test_a_step_that_cannot_be_recorded_is_taken_all_the_same_and_the_reason_is_kept():
    told = []

    def step() -> None:
        told.append(1)
        if len(told) == WARMUP_STEPS + 1:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

    recorder = GraphRecorder(enabled=True)
    taken(recorder, ["full"] * 20, step)
    assert len(told) == 20 + 1  # each step, and the attempt
    assert recorder.failure == "operation not permitted when stream is capturing"
    assert not recorder.enabled


def test_out_of_memory_is_not_taken_for_a_step_that_cannot_be_recorded():
    def step() -> None:
        if recorder.counts["full"] > WARMUP_STEPS:
            raise torch.OutOfMemoryError("CUDA out of memory")

    recorder = GraphRecorder(enabled=True)
    with pytest.raises(torch.OutOfMemoryError):
        taken(recorder, ["full"] * 20, step)


def test_without_a_gpu_nothing_is_recorded():
    told = []
    taken(GraphRecorder(enabled=False), ["full"] * 20, lambda: told.append(1))
    assert len(told) == 20
    assert Graph.made == []
