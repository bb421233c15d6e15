"""The scenarios: which outputs a task trains and is scored on, and the methods that a scenario refuses."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from laboratory.small import class_stream, domain_stream, growing_stream, spec_for
from mooring.errors import MooringError
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.grouping import fleet_shape
from mooring_lab.methods import METHODS, Method
from mooring_lab.model.results import Result
from mooring_lab.model.scenarios import SCENARIOS
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams import Split, Stream, Task, by_class, digits, permuted
from mooring_lab.streams.options import StreamOptions, open_stream
from mooring_lab.streams.slices import merge_tasks, select_tasks
from mooring_lab.streams.stream import in_scenario
from mooring_lab.study.comparison import comparison
from mooring_lab.study.study import Study

FIRST_STREAMS = {"classes": class_stream, "domains": domain_stream}


class Networks:
    """Keeps a copy of the network of every run after each task."""

    def __init__(self) -> None:
        self.networks: list[list[nn.Module]] = []

    def on_step(self, fleet: Fleet) -> None:
        pass

    def on_task_end(self, fleet: Fleet) -> None:
        self.networks.append([fleet.stack.network_of(row) for row in range(len(fleet.specs))])


def scored_by_hand(network: nn.Module, stream: Stream, trained: int, task: int) -> float:
    """The accuracy on a task, image by image; without the task's identity it competes with every class so far."""
    per_task = len(stream.tasks[0].classes)
    correct = 0
    for index in stream.tasks[task].test:
        x = normalize_pixels(stream.test.images[index][None], torch.float64)
        label = int(stream.test.labels[index])
        logits = network.eval()(x, min(task, trained) if stream.scenario == "task" else 0)[0]
        if stream.scenario == "class":
            logits, label = logits[: per_task * (max(task, trained) + 1)], label + per_task * task
        correct += int(logits.argmax()) == label
    return 100 * correct / len(stream.tasks[task].test)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("cut", FIRST_STREAMS)
def test_rows_of_the_accuracy_matrix_equal_those_scored_image_by_image(cut, scenario):
    stream, after = in_scenario(FIRST_STREAMS[cut](images=20), scenario), Networks()
    results = Fleet([spec_for("plain", stream, seed, epochs=1) for seed in (0, 1)], stream).run(after)
    for run, result in enumerate(results):
        assert result.scenario == scenario
        for trained, row in enumerate(result.matrix):
            network = after.networks[trained][run]
            assert row == [scored_by_hand(network, stream, trained, task) for task in range(len(row))]


@pytest.mark.parametrize(
    ("cut", "outputs"),
    [
        (by_class(digits(), 2), {"task": (5, 2), "class": (1, 10), "domain": (1, 2)}),
        (permuted(digits(), 3), {"task": (3, 10), "class": (1, 30), "domain": (1, 10)}),
    ],
)
def test_scenario_decides_the_number_of_heads_and_of_their_outputs(cut, outputs):
    streams = [in_scenario(cut, scenario) for scenario in SCENARIOS]
    assert {stream.scenario: (stream.head_count, stream.outputs) for stream in streams} == outputs
    assert len({stream.fingerprint for stream in streams}) == 3


def test_fingerprints_of_earlier_versions_are_still_found():
    assert by_class(digits(), 2).fingerprint == "5405a0540412f37ec1da0acb500abf8c"
    assert permuted(digits(), 3).fingerprint == "b65edfae62f801626b7ed68c19466ea7"


def test_outputs_of_later_classes_take_no_part_in_training():
    stream = growing_stream()
    spec = spec_for("plain", stream, epochs=1)
    fleet, after = Fleet([spec], stream), Networks()
    first = fleet.stack.parameters["heads.0.weight"][0].clone()
    fleet.run(after)
    for trained, (network,) in enumerate(after.networks):
        changed = (network.heads[0].weight != first).any(1)
        assert changed.tolist() == [True] * 2 * (trained + 1) + [False] * 2 * (2 - trained)


@pytest.mark.parametrize("method", ["er", "a-gem", "distil", "budget-measured", "budget-distil", "budget-kronecker"])
def test_method_with_data_or_factors_runs_alone_as_in_a_fleet_with_a_growing_head(method):
    stream = growing_stream()
    specs = [spec_for(method, stream, seed) for seed in (0, 1)]
    together = {result.spec.key: result for result in Fleet(specs, stream).run()}
    for spec in specs:
        (alone,) = Fleet([spec], stream).run()
        assert (alone.status, alone.matrix) == ("finished", together[spec.key].matrix)


STREAMS = {stream.scenario: stream for stream in (class_stream(), growing_stream(), domain_stream())}
LONG = {"sfa": 13}
"""Epochs of methods that pull in every 50th step only; an epoch has four steps."""

TIGHT = {"budget-ewc": 1e-9, "budget-measured": 1e-6}
"""Budgets that so little training would not spend otherwise."""


@pytest.fixture(scope="module")
def matrix():
    """The result and the final weights of each method in each scenario it is defined in, and of plain for as long."""
    outcomes = {}
    for scenario, stream in STREAMS.items():
        defined = [(name, LONG.get(name, 1)) for name, method in METHODS.items() if scenario in method.scenarios]
        fleets = {}
        for name, epochs in [*defined, *(("plain", epochs) for epochs in LONG.values())]:
            strength = {"strength": TIGHT[name]} if name in TIGHT else {}
            spec = spec_for(name, stream, epochs=epochs, **strength)
            fleets.setdefault(fleet_shape(spec), []).append(spec)
        for specs in fleets.values():
            fleet = Fleet(specs, stream)
            results = {result.spec.key: result for result in fleet.run()}
            for row, spec in enumerate(specs):
                weights = torch.cat([p.detach().flatten() for p in fleet.stack.network_of(row).parameters()])
                outcomes[scenario, spec.method, spec.epochs] = results[spec.key], weights
    return outcomes


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("method", METHODS)
def test_method_trains_in_a_scenario_and_differs_from_plain_or_is_refused(matrix, method, scenario):
    if scenario not in METHODS[method].scenarios:
        with pytest.raises(MooringError, match=f"{method} is not defined in the {scenario}-incremental scenario"):
            comparison("digits", method, scenario=scenario)
        return
    epochs = LONG.get(method, 1)
    result, weights = matrix[scenario, method, epochs]
    assert (result.status, result.scenario) == ("finished", scenario)
    assert weights.isfinite().all()
    assert torch.equal(weights, matrix[scenario, "plain", epochs][1]) == (method == "plain")


def test_fleet_with_a_growing_head_continues_from_a_checkpoint(tmp_path):
    stream = growing_stream()
    specs = [spec_for(method, stream) for method in ("plain", "uniform", "explicit-ewc", "balanced-ewc")]

    class Saved:
        def on_step(self, fleet):
            if fleet.position.task == 1 and fleet.position.step == 2 and not (tmp_path / "fleet").exists():
                checkpoint.save(fleet, tmp_path / "fleet")

        def on_task_end(self, fleet):
            pass

    whole = {result.spec.key: result for result in Fleet(specs, stream).run(Saved())}
    fleet = Fleet(specs, stream)
    checkpoint.restore(fleet, tmp_path / "fleet")
    for result in fleet.run():
        assert (result.matrix, result.importance) == (whole[result.spec.key].matrix, whole[result.spec.key].importance)


def test_merged_and_selected_tasks_keep_their_classes():
    stream = in_scenario(by_class(digits(), 2), "class")
    merged = merge_tasks(stream)
    assert torch.equal(merged.train.labels[merged.tasks[0].train].sort().values, digits().train.labels.sort().values)
    later = select_tasks(stream, skip=3)
    assert (later.outputs, [later.first_output(task) for task in (0, 1)]) == (4, [0, 2])


def test_images_of_several_tasks_are_refused_where_the_head_grows():
    split = Split(torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]))
    tasks = tuple(Task(name, torch.arange(4), torch.arange(4), (0, 1)) for name in ("one", "again"))
    stream = Stream("shared", split, split, tasks, "domain")
    with pytest.raises(MooringError, match="several tasks") as error:
        in_scenario(stream, "class")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("make", [lambda: StreamOptions(scenario="multi"), lambda: comparison(scenario="multi")])
def test_unknown_scenario_is_refused_in_one_line(make):
    with pytest.raises(MooringError, match=r"unknown scenario 'multi'.*task.*class.*domain") as error:
        make()
    assert "\n" not in str(error.value)


def test_method_is_refused_where_it_is_not_defined(monkeypatch):
    monkeypatch.setitem(METHODS, "gates", Method("gates", "a gate for each task", scenarios=("task",)))
    comparison("digits", "plain,gates")
    with pytest.raises(MooringError, match="gates is not defined in the class-incremental scenario") as error:
        comparison("digits", "plain,gates", scenario="class")
    assert "\n" not in str(error.value)
    stream = growing_stream()
    with pytest.raises(MooringError, match="gates is not defined"):
        Fleet([spec_for("gates", stream)], stream)


def test_scenario_of_a_method_is_checked():
    with pytest.raises(MooringError, match="unknown scenario of method 'gates' 'tasks'"):
        Method("gates", "a gate for each task", scenarios=("tasks",))


def test_scenarios_of_one_data_set_are_separate_rows_that_say_which(tmp_path):
    study = Study(tmp_path / "digits.sqlite")
    streams = [StreamOptions("digits", limit=20, tasks=2, scenario=scenario) for scenario in SCENARIOS]
    rows = study.compare(stream=streams, methods="plain", seeds=1, epochs=1)
    assert [row.scenario for row in rows] == list(SCENARIOS)
    assert [row.to_json()["scenario"] for row in rows] == list(SCENARIOS)
    assert len({row.stream for row in rows}) == 3
    assert [Result.from_json(json.loads(json.dumps(r.to_json()))).scenario for r in study.results()] == [*SCENARIOS]


def test_result_without_a_scenario_has_the_one_that_its_stream_had():
    result = Fleet([spec_for("plain", class_stream(), epochs=1)], class_stream()).run()[0]
    names = {"digits (2 classes a task)": "task", "digits (5 permutations, seed 0), tasks 1 to 2": "domain"}
    for name, scenario in {**names, "digits (3 rotations within 180°)": "domain"}.items():
        stored = {**result.to_json(), "spec": replace(result.spec, stream=name).to_json()}
        del stored["scenario"]
        assert Result.from_json(stored).scenario == scenario


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_options_open_the_stream_in_their_scenario(scenario):
    for name in ("digits", "digits-rotated"):
        assert open_stream(StreamOptions(name, limit=10, scenario=scenario)).scenario == scenario


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_joint_training_is_scored_among_the_classes_up_to_each_task(scenario):
    stream, after = in_scenario(class_stream(images=20), scenario), Networks()
    (result,) = Fleet([spec_for("joint", stream, epochs=1)], stream).run(after)
    network = after.networks[-1][0]
    assert result.matrix[-1] == [scored_by_hand(network, stream, 2, task) for task in range(3)]
    up_to = [scored_by_hand(network, stream, task if scenario == "class" else 2, task) for task in range(3)]
    assert result.joint == up_to
    assert (result.joint == result.matrix[-1]) == (scenario != "class")  # among fewer classes more are right
