"""A fleet: what it writes down equals a loop by hand, and each run is alone with its fate."""

import copy
import math
import random as python_random
from dataclasses import dataclass, field, replace

import numpy
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mooring
from laboratory import small
from laboratory.small import class_stream, domain_stream, optimizer_by_hand
from mooring.diagnose.diagnosis import Diagnosis
from mooring.diagnose.drift import cka
from mooring.errors import MooringError, NonFiniteError
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.grouping import fleet_shape
from mooring_lab.methods import METHODS, find_method
from mooring_lab.model.order import joint_order, seeded_generator, task_order
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.streams import Stream

STREAMS = {"classes": class_stream(), "domains": domain_stream()}
EXACT = {"rtol": 1e-9, "atol": 1e-9}
HERE = "laboratory.test_fleet"
Weights = dict[str, torch.Tensor]


GENTLE = {"ewc": 3.0, "mas": 1e-3, "si": 0.1, "rwalk": 0.01, "uniform": 0.1, "random": 0.3}
GENTLE |= {f"balanced-{name}": strength for name, strength in GENTLE.items()}
GENTLE |= {"si-signed": 0.1, "si-negative": 0.1, "si-absolute": 0.1, "clamped-ewc": 1e4, "proximal-ewc": 300.0} | {
    "budget-ewc": 1e-4,
    "budget-kronecker": 1e-4,
}
"""Strengths at which no run explodes on so little data."""


def spec_for(method: str, stream: Stream, seed: int = 1, **options) -> RunSpec:
    return small.spec_for(method, stream, seed, **{"lr": 0.02, "strength": GENTLE.get(method), **options})


# What is seen of a fleet, and the same by hand


@dataclass
class Log:
    """Follows a fleet: what each run saw, its weights after each task, and its weights after each step."""

    weights: dict[str, list[Weights]] = field(default_factory=dict)
    seen: dict[str, list[list[int]]] = field(default_factory=dict)
    steps: dict[str, list[Weights]] = field(default_factory=dict)
    keep_steps: bool = False

    def on_step(self, fleet: Fleet) -> None:
        end = fleet.position.step * fleet.common.batch
        for row, spec in enumerate(fleet.specs):
            self.seen.setdefault(spec.key, []).append(
                fleet.epoch_indices.indices[row, end - fleet.common.batch : end].tolist()
            )
            if self.keep_steps:
                self.steps.setdefault(spec.key, []).append(fleet.stack.network_of(row).state_dict())

    def on_task_end(self, fleet: Fleet) -> None:
        for row, spec in enumerate(fleet.specs):
            self.weights.setdefault(spec.key, []).append(fleet.stack.network_of(row).state_dict())


def results_of(specs: list[RunSpec], stream: Stream, **options) -> tuple[dict[str, Result], Log]:
    log = Log(**{name: options.pop(name) for name in ("keep_steps",) if name in options})
    results = Fleet(specs, stream, **options).run(log)
    assert sorted(r.spec.key for r in results) == sorted(
        s.key for s in specs
    )  # one for each run, whatever became of it
    return {result.spec.key: result for result in results}, log


@dataclass
class Hand:
    """What a plain PyTorch loop with `mooring.attach` came to."""

    model: nn.Module
    first: nn.Module | None = None
    untrained: list[float] = field(default_factory=list)
    matrix: list[list[float]] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    diagnoses: list[Diagnosis] = field(default_factory=list)
    previous: dict[str, torch.Tensor] = field(default_factory=dict)
    stopped: tuple[int, int] | None = None
    """The task and step, counted from 1, whose gradient was not finite."""


def accuracies(model: nn.Module, spec: RunSpec, stream: Stream, trained: int, tasks: int | None = None) -> list[float]:
    """One test image after the other; a task to come is asked of the head that it would start from."""
    inherits = spec.heads == "inherit" and spec.method != "joint"
    model.eval()
    percents = []
    for number, task in enumerate(stream.tasks[:tasks]):
        head = 0 if stream.heads == "one" else min(number, trained) if inherits else number
        right = 0
        for index in task.test:
            x = normalize_pixels(stream.test.images[index][None], getattr(torch, spec.dtype))
            right += int(model(x, head)[0, : len(task.classes)].argmax()) == int(stream.test.labels[index])
        percents.append(100 * right / len(task.test))
    return percents


def by_hand(spec: RunSpec, stream: Stream) -> Hand:
    method, dtype = find_method(spec.method), getattr(torch, spec.dtype)
    model = initial_network(spec.network, stream, spec.seed, dtype=dtype)
    optimizer = optimizer_by_hand(spec, model.parameters())
    moor = None
    if method.importance is not None:
        moor = mooring.attach(
            model,
            optimizer,
            importance=method.importance(spec.seed),
            pull=method.pull(spec.strength or 0.0),
            merge=method.merge,
            exclude="heads" if stream.heads == "per task" else (),
        )
    owner = {int(i): stream.head(number) for number, task in enumerate(stream.tasks) for i in task.train}
    hand, steps = Hand(model, untrained=accuracies(model, spec, stream, 0)), 0
    for number, task in enumerate(stream.tasks):
        if number and stream.heads == "per task" and spec.heads == "inherit" and not method.all_tasks:
            model.inherit(number, number - 1)
        optimizer.state.clear()
        still = number >= getattr(method.plugin, "trained_tasks", number + 1)
        model.backbone.requires_grad_(not still)
        hand.losses.append([])
        for epoch in range(spec.epochs):
            order = task_order(spec.seed, number, epoch, task.train)
            if method.all_tasks:
                order = joint_order(spec.seed, number, epoch, [t.train for t in stream.tasks], spec.epochs)
            for batch in order.split(spec.batch):
                model.train(not still)
                optimizer.zero_grad()
                heads = torch.tensor([owner[int(i)] for i in batch]) if method.all_tasks else stream.head(number)
                with torch.random.fork_rng():
                    torch.manual_seed(seeded_generator(spec.seed, "forward", steps + 1).initial_seed())  # for dropout
                    logits = model(normalize_pixels(stream.train.images[batch], dtype), heads)
                loss = cross_entropy(logits, stream.train.labels[batch])
                loss.backward()
                try:
                    if moor is None and not all(
                        bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None
                    ):
                        raise NonFiniteError("as attach would")
                    optimizer.step()
                except NonFiniteError:
                    hand.stopped = (number + 1, steps + 1)
                    return hand
                steps += 1
                hand.losses[-1].append(loss.item())
        if moor is not None:
            moor.consolidate()
            if isinstance(moor.pull, mooring.Penalty):
                hand.diagnoses.append(moor.diagnose())
        hand.matrix.append(accuracies(model, spec, stream, number, number + 2))  # so far, and the next
        if number == 0:
            hand.first = copy.deepcopy(model)
    hand.previous = {} if moor is None else moor.previous
    return hand


def same(result: Result, other: Result) -> None:
    """Equal but for the time they took, numbers to 1e-9."""
    assert (result.spec, result.status, result.reason) == (other.spec, other.status, other.reason)
    assert (result.untrained, result.matrix, result.steps) == (other.untrained, other.matrix, other.steps)
    assert len(result.losses) == len(other.losses)
    for loss, expected in zip(result.losses, other.losses, strict=True):
        assert loss == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for name in ("importance", "drift", "cka"):
        assert getattr(result, name) == pytest.approx(getattr(other, name), rel=1e-8, abs=1e-9)
    assert [replace(s, largest=0, safe_strength=0) for s in result.stability] == [
        replace(s, largest=0, safe_strength=0) for s in other.stability
    ]


# What is written down


JUDGED = ("ewc", "balanced-ewc", "clamped-ewc", "si-signed", "random", "uniform", "mas", "rwalk")
OTHERS = ("plain", "frozen", "frozen-after-first", "joint", "explicit-si", "explicit-random", "proximal-ewc")


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", [*JUDGED, *OTHERS])
def test_what_a_fleet_writes_down_is_what_a_loop_by_hand_measures(method, kind):
    stream = STREAMS[kind]
    spec = spec_for(method, stream, lr=0.05)
    result = results_of([spec], stream)[0][spec.key]
    hand = by_hand(spec, stream)
    assert hand.stopped is None
    assert (result.status, result.reason, result.steps) == ("finished", "", sum(map(len, hand.losses)))
    assert result.untrained == pytest.approx(hand.untrained, rel=1e-12)
    assert result.matrix == [pytest.approx(row, rel=1e-12) for row in hand.matrix]
    assert result.losses == [pytest.approx(row, rel=1e-9) for row in hand.losses]  # 8 steps a task: each is a stretch
    means: dict[str, list[torch.Tensor]] = {}
    for name, score in hand.previous.items():
        means.setdefault(name.rpartition(".")[0], []).append(score.flatten())
    assert result.importance == pytest.approx({n: float(torch.cat(s).mean()) for n, s in means.items()}, rel=1e-9)
    moved = {}
    for (name, p), q in zip(hand.model.backbone.named_parameters(), hand.first.backbone.parameters(), strict=True):
        moved.setdefault(f"backbone.{name.rpartition('.')[0]}", []).append(((p - q).flatten(), q.flatten()))
    drift = {
        name: (torch.cat([d for d, _ in parts]).norm() / torch.cat([q for _, q in parts]).norm()).item()
        for name, parts in moved.items()
    }
    assert result.drift == pytest.approx(drift, rel=1e-8, abs=1e-12)
    inputs = normalize_pixels(stream.test.images[stream.tasks[0].test], torch.float64)
    assert result.cka == pytest.approx(cka(hand.first, hand.model, inputs, layers=list(drift)), rel=1e-8)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", JUDGED)
def test_stability_in_a_result_is_what_diagnose_says_in_a_loop_by_hand(method, kind):
    stream = STREAMS[kind]
    strength = {"ewc": 500.0, "uniform": 90.0, "random": 190.0, "rwalk": 1.0, "mas": 0.2}
    decay = 1.0 if method == "si-signed" else 0.0  # momentum alone never gives a path below 0
    spec = spec_for(method, stream, lr=0.02, weight_decay=decay)
    spec = replace(spec, strength=strength.get(method, spec.strength))
    result = check_stability(spec, stream)
    if method == "si-signed":
        assert result.stability[0].negative
    if method in ("ewc", "uniform", "random"):
        assert result.stability[0].extrapolate + result.stability[0].interpolate > 0


@pytest.mark.parametrize("method", ["ewc", "balanced-ewc", "random", "mas"])
def test_stability_with_adamw_is_what_diagnose_says_in_a_loop_by_hand(method):
    """The limit is Adam's, and the learning rate of each weight the present one."""
    strength = {"ewc": 3e4, "balanced-ewc": 3e4, "random": 0.003, "mas": 2.0}[method]
    stream = STREAMS["classes"]
    spec = replace(spec_for(method, stream, lr=0.003, optimizer="adamw", momentum=0.8), strength=strength)
    entry = check_stability(spec, stream).stability[0]
    assert entry.interpolate
    assert entry.extrapolate


def check_stability(spec: RunSpec, stream: Stream) -> Result:
    """Compare what a fleet records with `Mooring.diagnose` in a loop by hand, after each task."""
    result, hand = results_of([spec], stream)[0][spec.key], by_hand(spec, stream)
    assert len(result.stability) == len(hand.diagnoses) > 0
    for number, (verdict, expected) in enumerate(zip(result.stability, hand.diagnoses, strict=True), 1):
        total = expected.total
        counts = (verdict.free, verdict.interpolate, verdict.extrapolate, verdict.diverge, verdict.negative)
        assert counts == (total.free, total.interpolate, total.extrapolate, total.diverge, total.negative)
        assert verdict.task == number
        assert verdict.largest == pytest.approx(max(layer.largest_p for layer in expected.layers), rel=1e-9)
        assert verdict.safe_strength == pytest.approx(expected.safe_strength, rel=1e-9)
        assert bool(verdict.warning) == bool(total.extrapolate + total.diverge)
    return result


@pytest.mark.parametrize("method", OTHERS)
def test_methods_without_a_penalty_have_no_stability_to_tell(method):
    spec = spec_for(method, STREAMS["classes"])
    assert results_of([spec], STREAMS["classes"])[0][spec.key].stability == []


def test_a_loss_curve_is_the_mean_over_equal_stretches_of_a_task():
    stream = STREAMS["classes"]
    spec = spec_for("plain", stream, 5, batch=1, epochs=2, lr=0.002)  # 72 steps a task, in 20 stretches of 3 or 4
    result, hand = results_of([spec], stream)[0][spec.key], by_hand(spec, stream)
    for curve, losses in zip(result.losses, hand.losses, strict=True):
        stretches: list[list[float]] = [[] for _ in range(20)]
        for step, loss in enumerate(losses):
            stretches[step * 20 // 72].append(loss)
        assert curve == pytest.approx([sum(stretch) / len(stretch) for stretch in stretches], rel=1e-9)
        weighted = sum(point * len(stretch) for point, stretch in zip(curve, stretches, strict=True)) / 72
        assert weighted == pytest.approx(sum(losses) / 72, rel=1e-9)
        assert curve[0] > curve[-1]  # it learned something


@pytest.mark.parametrize(("batch", "epochs", "points"), [(36, 1, 1), (10, 1, 4), (10, 5, 20), (9, 6, 20)])
def test_a_loss_curve_has_no_more_points_than_steps_and_no_empty_ones(batch, epochs, points):
    stream = STREAMS["domains"]
    spec = spec_for("plain", stream, batch=batch, epochs=epochs)
    result, hand = results_of([spec], stream)[0][spec.key], by_hand(spec, stream)
    assert [len(curve) for curve in result.losses] == [points] * 3
    assert all(math.isfinite(value) and value > 0 for curve in result.losses for value in curve)
    if points < 20 or batch == 10:
        means = [[sum(curve) / len(curve)] if points == 1 else curve for curve in hand.losses]
        assert result.losses == [pytest.approx(curve, rel=1e-9) for curve in means]


def test_what_was_kept_of_the_first_model_is_all_of_it_where_the_backbone_froze_after_it():
    for network in ("mlp", f"{HERE}:normalised", f"{HERE}:convolving"):
        spec = spec_for("frozen-after-first", STREAMS["classes"], network=network)
        result = results_of([spec], STREAMS["classes"])[0][spec.key]
        assert len(result.cka) == len(result.drift) >= 2
        assert set(result.drift.values()) == {0.0}
        assert list(result.cka.values()) == pytest.approx([1.0] * len(result.cka), abs=1e-12)
        plain = spec_for("plain", STREAMS["classes"], network=network)
        moved = results_of([plain], STREAMS["classes"])[0][plain.key]
        assert all(value > 0 for value in moved.drift.values())
        assert all(-0.2 < value < 1 for value in moved.cka.values())


@pytest.mark.parametrize("network", ["normalised", "convolving"])
def test_cka_is_to_the_model_after_the_first_task_with_the_statistics_that_it_had_then(network):
    stream = STREAMS["classes"]
    spec = spec_for("plain", stream, network=f"{HERE}:{network}", lr=0.1)
    result, hand = results_of([spec], stream)[0][spec.key], by_hand(spec, stream)
    inputs = normalize_pixels(stream.test.images[stream.tasks[0].test], torch.float64)
    assert result.cka == pytest.approx(cka(hand.first, hand.model, inputs, layers=list(result.cka)), rel=1e-8)


def test_untrained_accuracy_is_that_of_the_network_before_its_first_step():
    stream = STREAMS["domains"]
    specs = [spec_for("plain", stream, seed, lr=1e-30, epochs=1) for seed in (0, 1)]
    results, _ = results_of(specs, stream)
    for spec in specs:
        result = results[spec.key]
        assert result.matrix == [result.untrained[:scored] for scored in (2, 3, 3)]  # it stood still
        assert 0 <= min(result.untrained) <= max(result.untrained) < 45


# Diverging runs


def with_neighbours(stream: Stream, bad: RunSpec, row: int) -> list[RunSpec]:
    stable = [
        spec_for(bad.method, stream, 0),
        spec_for(bad.method, stream, 1, lr=0.01),
        spec_for("plain", stream, 2),
        spec_for("explicit-si", stream, 3),
    ]
    return [*stable[:row], bad, *stable[row:]]


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("method", ["ewc", "random"])
def test_a_diverged_run_is_marked_unstable_and_its_neighbours_are_untouched(method, row, kind):
    stream = STREAMS[kind]
    bad = spec_for(method, stream, 7, strength=1e40)
    specs = with_neighbours(stream, bad, row)
    results, log = results_of(specs, stream)
    others, without = results_of([spec for spec in specs if spec is not bad], stream)
    assert results[bad.key].status == "unstable"
    for key, expected in others.items():
        assert expected.status == "finished"
        same(results[key], expected)
        torch.testing.assert_close(log.weights[key], without.weights[key], **EXACT)


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize(
    ("method", "strength", "lr"),
    [
        ("ewc", 1e12, 0.02),
        ("ewc", 1e9, 0.01),
        ("balanced-rwalk", 1e12, 0.02),
        ("mas", 1e6, 0.02),
        ("uniform", 1e4, 0.02),
        ("uniform", 1e308, 30.0),  # the penalty overflows before the task's own gradient does
        ("plain", None, 1e30),
        ("joint", None, 1e20),
    ],
)
def test_an_unstable_run_stops_at_the_step_at_which_a_loop_by_hand_meets_what_is_not_finite(method, strength, lr, kind):
    stream = STREAMS[kind]
    spec = spec_for(method, stream, 3, strength=strength, lr=lr, epochs=8)
    result, hand = results_of([spec], stream)[0][spec.key], by_hand(spec, stream)
    task, step = hand.stopped
    assert (result.status, result.steps) == ("unstable", step - 1)
    assert result.reason == f"its gradient was not finite in step {step}, in task {task}"
    assert len(result.matrix) == len(result.losses) == task - 1  # what it finished before
    assert result.matrix == [pytest.approx(row) for row in hand.matrix]
    assert len(result.stability) == len(hand.diagnoses)
    assert (result.importance, result.drift, result.cka) == ({}, {}, {})
    assert all(math.isnan(value) for value in result.metrics.values())


def test_a_fleet_whose_runs_all_diverge_ends_with_a_result_for_each():
    stream = STREAMS["classes"]
    specs = [spec_for("ewc", stream, seed, strength=10.0 ** (12 + seed)) for seed in range(3)]
    results, log = results_of(specs, stream)
    assert [results[spec.key].status for spec in specs] == ["unstable"] * 3
    for spec in specs:
        task = int(results[spec.key].reason.rpartition(" ")[2])
        assert len(log.weights[spec.key]) == task - 1 > 0  # it went on until then


def test_runs_that_diverge_one_after_the_other_leave_the_last_as_it_would_be_alone():
    stream = STREAMS["domains"]
    bad = [spec_for("ewc", stream, seed, strength=strength) for seed, strength in ((1, 1e18), (2, 1e14), (3, 1e10))]
    good = spec_for("ewc", stream, 9)
    results, log = results_of([bad[0], good, bad[1], bad[2]], stream)
    stops = [results[spec.key].steps for spec in bad]
    assert stops[0] < stops[2]  # not all at once
    alone, sole = results_of([good], stream)
    same(results[good.key], alone[good.key])
    torch.testing.assert_close(log.weights[good.key], sole.weights[good.key], **EXACT)


@pytest.mark.parametrize("network", ["mlp", f"{HERE}:normalised", f"{HERE}:convolving", f"{HERE}:dropping"])
@pytest.mark.parametrize("method", ["plain", "joint", "er", "a-gem", "explicit-mas", "frozen-after-first"])
def test_whatever_the_method_a_run_lost_in_the_first_row_does_not_move_the_others(method, network):
    stream = STREAMS["classes"]
    bad = spec_for(method, stream, 5, lr=1e200, network=network)
    good = [spec_for(method, stream, seed, network=network) for seed in (2, 3)]
    results, log = results_of([bad, *good], stream)
    others, without = results_of(good, stream)
    assert results[bad.key].status == "unstable"
    assert "in task 1" in results[bad.key].reason
    for spec in good:
        same(results[spec.key], others[spec.key])
        torch.testing.assert_close(log.weights[spec.key], without.weights[spec.key], **EXACT)


# Rejection


def test_penalties_that_would_extrapolate_are_rejected_after_the_first_task_and_no_others():
    stream = STREAMS["domains"]
    strong = {name: method for name, method in METHODS.items() if method.has_strength and method.anchors == "last"}
    strengths = {n: 1e9 if hasattr(m.pull(1.0), "strength") else m.dial[-1] for n, m in strong.items()}
    specs = [spec_for(name, stream, 0, strength=strength, epochs=1) for name, strength in strengths.items()]
    specs += [spec_for(name, stream, 0, epochs=1) for name in METHODS if name.startswith(("explicit", "plain"))]
    for kind in {fleet_shape(spec) for spec in specs}:
        fleet = [spec for spec in specs if fleet_shape(spec) == kind]
        results, _ = results_of(fleet, stream, reject=True)
        for spec in fleet:
            result, safe = results[spec.key], not METHODS[spec.method].can_extrapolate
            assert result.status == ("finished" if safe else "rejected"), spec.method
            if not safe:
                beyond = result.stability[0].extrapolate + result.stability[0].diverge
                assert f"leaves (0, 1) in {beyond:,} of " in result.reason
                assert "after 1 task " in result.reason
                assert "\n" not in result.reason
                assert (len(result.stability), result.matrix, result.steps) == (1, [], 4)


def test_a_penalty_that_interpolates_everywhere_is_not_rejected_and_goes_on_as_if_nobody_had_asked():
    stream = STREAMS["classes"]
    mild, wild = spec_for("ewc", stream, 0), spec_for("ewc", stream, 0, strength=1e9)
    results, log = results_of([wild, mild], stream, reject=True)
    others, without = results_of([mild], stream)
    assert results[wild.key].status == "rejected"
    same(results[mild.key], others[mild.key])
    torch.testing.assert_close(log.weights[mild.key], without.weights[mild.key], **EXACT)


def test_the_limit_of_rejection_is_the_safe_strength():
    stream = STREAMS["classes"]
    asked = spec_for("ewc", stream, 4, strength=1.0)
    safe = results_of([asked], stream)[0][asked.key].stability[0].safe_strength
    below, above = (replace(asked, strength=safe * factor) for factor in (0.999, 1.001))
    results, _ = results_of([below, above], stream, reject=True)
    assert results[below.key].status != "rejected"
    assert results[above.key].status == "rejected"
    assert "in 1 of 16,600 parameters" in results[above.key].reason


def test_all_runs_of_a_fleet_may_be_rejected():
    stream = STREAMS["classes"]
    specs = [spec_for("ewc", stream, seed, strength=1e9) for seed in (0, 1)]
    results, log = results_of(specs, stream, reject=True)
    assert [results[spec.key].status for spec in specs] == ["rejected"] * 2
    assert log.weights == {}


# Controls


def backbone(weights: Weights) -> Weights:
    return {name: tensor for name, tensor in weights.items() if name.startswith("backbone.")}


def equal(one: Weights, other: Weights) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("network", ["mlp", f"{HERE}:normalised", f"{HERE}:convolving"])
def test_a_frozen_backbone_does_not_move_by_a_bit_nor_do_its_statistics(network):
    stream = STREAMS["classes"]
    spec = spec_for("frozen", stream, 2, network=network, weight_decay=0.1)
    _, log = results_of([spec], stream)
    begun = initial_network(network, stream, 2, dtype=torch.float64).state_dict()
    assert network == "mlp" or any("running_mean" in name for name in backbone(begun))
    for number, weights in enumerate(log.weights[spec.key]):
        assert equal(backbone(weights), backbone(begun))
        assert not torch.equal(weights[f"heads.{number}.weight"], begun[f"heads.{number}.weight"])


@pytest.mark.parametrize("network", ["mlp", f"{HERE}:normalised", f"{HERE}:convolving"])
def test_a_backbone_frozen_after_the_first_task_moves_in_the_first_and_never_again(network):
    stream = STREAMS["classes"]
    frozen, plain = (spec_for(m, stream, 2, network=network) for m in ("frozen-after-first", "plain"))
    _, log = results_of([frozen], stream)
    _, free = results_of([plain], stream)
    first, second, third = (backbone(weights) for weights in log.weights[frozen.key])
    begun = backbone(initial_network(network, stream, 2, dtype=torch.float64).state_dict())
    moving = [name for name in begun if name.endswith(("weight", "running_mean", "running_var"))]
    assert len(moving) == (2 if network == "mlp" else 5)
    assert all(not torch.equal(first[name], begun[name]) for name in moving)
    assert equal(first, backbone(free.weights[plain.key][0]))  # as plain fine-tuning so far
    assert equal(first, second)
    assert equal(first, third)


def test_joint_training_sees_every_image_as_often_as_other_methods_do_in_as_many_steps():
    stream = class_stream(tasks=3, images=36)
    stream = replace(stream, tasks=(replace(stream.tasks[0], train=stream.tasks[0].train[:17]), *stream.tasks[1:]))
    joint, plain = spec_for("joint", stream), spec_for("plain", stream)
    results, log = results_of([joint], stream)
    theirs, other = results_of([plain], stream)
    every = sorted(int(i) for task in stream.tasks for i in task.train for _ in range(2))
    for seen in (log.seen[joint.key], other.seen[plain.key]):
        assert sorted(index for batch in seen for index in batch) == every
    assert [len(batch) for batch in log.seen[joint.key]] == [len(batch) for batch in other.seen[plain.key]]
    assert results[joint.key].steps == theirs[plain.key].steps == 2 * (2 + 4 + 4)
    early = {index for batch in log.seen[joint.key][:4] for index in batch}
    assert all(early & set(task.train.tolist()) for task in stream.tasks)  # not one task after the other


@pytest.mark.parametrize("heads", ["inherit", "fresh"])
def test_the_head_of_a_task_starts_from_the_one_before_or_afresh(heads):
    """With so small a learning rate in a fleet that stops, a head after its first step is where it started."""
    stream = STREAMS["classes"]
    spec = spec_for("plain", stream, 6, heads=heads, lr=1e-12, momentum=0.0)
    _, log = results_of([spec], stream, keep_steps=True)
    begun = initial_network("mlp", stream, 6, dtype=torch.float64).state_dict()
    for task in (1, 2):
        before, after = log.steps[spec.key][8 * task - 1], log.steps[spec.key][8 * task]
        for kind in ("weight", "bias"):
            came = before[f"heads.{task - 1}.{kind}"] if heads == "inherit" else begun[f"heads.{task}.{kind}"]
            torch.testing.assert_close(after[f"heads.{task}.{kind}"], came, rtol=0, atol=1e-10)
            assert not torch.allclose(
                begun[f"heads.{task}.{kind}"], before[f"heads.{task - 1}.{kind}"], rtol=0, atol=1e-3
            )


# Its own spec alone


@pytest.mark.parametrize("kind", STREAMS)
def test_a_run_does_not_depend_on_the_order_or_the_settings_of_its_neighbours(kind):
    stream = STREAMS[kind]
    ours = [spec_for("ewc", stream, seed) for seed in (0, 1, 2)] + [spec_for("random", stream, 1)]
    results, log = results_of(ours, stream)
    strangers = [spec_for("ewc", stream, seed, lr=0.3) for seed in (0, 1)] + [spec_for("balanced-ewc", stream, 0)]
    others, among = results_of([strangers[0], *ours[::-1], *strangers[1:]], stream)
    for spec in ours:
        same(results[spec.key], others[spec.key])
        torch.testing.assert_close(log.weights[spec.key], among.weights[spec.key], **EXACT)
    finals = [log.weights[spec.key][-1]["backbone.1.weight"] for spec in ours[:3]]
    assert not torch.allclose(finals[0], finals[1])  # seeds matter


@pytest.mark.parametrize("network", ["mlp", f"{HERE}:normalised", f"{HERE}:convolving"])
def test_in_float32_a_run_alone_and_in_a_fleet_differ_by_rounding_only(network):
    """Stated tolerance: 1e-4 on every weight after 24 steps, and the same accuracies to two images."""
    stream = STREAMS["classes"]
    specs = [spec_for(name, stream, 1, dtype="float32", network=network) for name in ("plain", "ewc", "explicit-si")]
    specs += [spec_for("plain", stream, seed, lr=0.05, dtype="float32", network=network) for seed in (2, 3, 4)]
    results, log = results_of(specs, stream)
    for spec in specs[:4]:
        alone, sole = results_of([spec], stream)
        ours, theirs = log.weights[spec.key][-1], sole.weights[spec.key][-1]
        assert ours["heads.0.weight"].dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        for row, other in zip(results[spec.key].matrix, alone[spec.key].matrix, strict=True):
            assert row == pytest.approx(other, abs=200 / 36 + 1e-9)


@pytest.mark.parametrize("network", ["mlp", f"{HERE}:dropping"])
def test_a_fleet_leaves_global_random_state_dtype_and_grad_mode_alone(network):
    stream = STREAMS["classes"]
    torch.manual_seed(123)
    before = torch.get_rng_state(), python_random.getstate(), numpy.random.get_state()[1].tolist()
    for method in ("si-negative", "explicit-mas", "er", "a-gem", "joint", "random"):
        results_of([spec_for(method, stream, seed, network=network, epochs=1) for seed in (0, 1)], stream)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert python_random.getstate() == before[1]
    assert numpy.random.get_state()[1].tolist() == before[2]
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


def test_a_run_does_not_depend_on_the_state_of_the_world_outside():
    stream = STREAMS["classes"]
    spec = spec_for("explicit-random", stream, 1, network=f"{HERE}:dropping")
    torch.manual_seed(1)
    results, log = results_of([spec], stream)
    torch.manual_seed(2)
    others, again = results_of([spec], stream)
    same(results[spec.key], others[spec.key])
    assert equal(log.weights[spec.key][-1], again.weights[spec.key][-1])


def test_a_run_does_not_depend_on_the_default_dtype():
    stream = STREAMS["classes"]
    spec = spec_for("plain", stream, 1)
    results, _ = results_of([spec], stream)
    torch.set_default_dtype(torch.float64)
    try:
        others, _ = results_of([spec], stream)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    same(others[spec.key], results[spec.key])


# Networks of one's own


def normalised(shape: tuple[int, int, int]) -> nn.Module:
    """With statistics, and stacked."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU())


def convolving(shape: tuple[int, int, int]) -> nn.Module:
    """With statistics, and on a CPU one after the other, because that is faster."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 12), nn.ReLU()
    )


def dropping(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Dropout(0.2))


class Branching(nn.Module):
    """Looks at its values to decide what to do; both of its layers run all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.outer(torch.relu(self.inner(x.flatten(1))))
        return torch.relu(features) if float(self.outer.bias.detach().sum()) > 0 else torch.tanh(features)


class Scaling(nn.Module):
    """Has a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(64, 16), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x.flatten(1))) * self.scale


class Borrowing(nn.Module):
    """Uses the weight of a layer that never runs itself, as nn.MultiheadAttention does with its out_proj."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.borrowed = nn.Linear(64, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.relu(self.inner(x.flatten(1))), self.borrowed.weight, self.borrowed.bias)


def branching(shape: tuple[int, int, int]) -> nn.Module:
    return Branching()


def scaling(shape: tuple[int, int, int]) -> nn.Module:
    return Scaling()


def borrowing(shape: tuple[int, int, int]) -> nn.Module:
    return Borrowing()


def flat(shape: tuple[int, int, int]) -> nn.Module:
    return nn.Flatten()


@pytest.mark.parametrize("network", ["dropping", "branching"])
@pytest.mark.parametrize("method", ["plain", "ewc", "explicit-mas", "joint"])
def test_a_network_that_cannot_be_stacked_trains_run_by_run_and_equals_the_loop_by_hand(network, method):
    stream = STREAMS["classes"]
    specs = [spec_for(method, stream, seed, network=f"{HERE}:{network}", lr=0.05 * (seed + 1)) for seed in (0, 1, 2)]
    assert Fleet(specs, stream).stack.mode == "sequential"
    results, log = results_of(specs, stream)
    for spec in specs:
        hand = by_hand(spec, stream)
        torch.testing.assert_close(log.weights[spec.key][-1], hand.model.state_dict(), **EXACT)
        assert results[spec.key].matrix == [pytest.approx(row) for row in hand.matrix]
    assert not torch.equal(*(log.weights[spec.key][-1]["heads.0.weight"] for spec in specs[:2]))


class Centring(nn.Module):
    """Looks across the samples of its batch, outside of any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.flatten(1))
        return torch.relu(y - y.mean(0))


def centring(shape: tuple[int, int, int]) -> nn.Module:
    return Centring()


@pytest.mark.parametrize(
    ("network", "mode"),
    [
        ("mlp", "batched"),
        (f"{HERE}:normalised", "batched"),
        (f"{HERE}:convolving", "batched"),
        ("resnet18-third", "batched"),
        (f"{HERE}:scaling", "vmap"),
        (f"{HERE}:borrowing", "vmap"),
        (f"{HERE}:centring", "vmap"),
        (f"{HERE}:branching", "sequential"),
        (f"{HERE}:dropping", "sequential"),
    ],
)
def test_each_network_is_stacked_the_fastest_way_that_is_right(network, mode):
    stream = STREAMS["classes"]
    specs = [spec_for("plain", stream, seed, network=network) for seed in (0, 1)]
    assert Fleet(specs, stream).stack.mode == mode


def test_a_network_that_looks_across_its_batch_does_not_see_other_runs():
    stream = STREAMS["classes"]
    specs = [spec_for("ewc", stream, seed, network=f"{HERE}:centring") for seed in (0, 1, 2)]
    _, log = results_of(specs, stream)
    for spec in specs:
        torch.testing.assert_close(log.weights[spec.key][-1], by_hand(spec, stream).model.state_dict(), **EXACT)


def test_trying_whether_a_network_can_be_stacked_leaves_its_statistics_alone():
    stream = STREAMS["classes"]
    spec = spec_for("plain", stream, 3, network=f"{HERE}:normalised")
    assert equal(
        Fleet([spec], stream).stack.network_of(0).state_dict(),
        initial_network(spec.network, stream, 3, dtype=torch.float64).state_dict(),
    )


@pytest.mark.parametrize("method", ["plain", "ewc", "balanced-ewc", "a-gem"])
def test_a_network_with_a_parameter_that_is_one_number_trains(method):
    stream = STREAMS["domains"]
    spec = spec_for(method, stream, network=f"{HERE}:scaling")
    results, log = results_of([spec, replace(spec, seed=8)], stream)
    assert results[spec.key].status == "finished"
    if method != "a-gem":
        torch.testing.assert_close(log.weights[spec.key][-1], by_hand(spec, stream).model.state_dict(), **EXACT)


@pytest.mark.parametrize("method", ["plain", "frozen", "ewc", "clamped-ewc", "balanced-ewc", "explicit-ewc"])
def test_a_backbone_without_parameters_trains_with_whatever_method(method):
    stream = STREAMS["classes"]
    spec = spec_for(method, stream, network=f"{HERE}:flat")
    result = results_of([spec], stream)[0][spec.key]
    assert (result.status, result.importance, result.drift, result.cka) == ("finished", {}, {}, {})


def test_a_layer_that_never_runs_itself_costs_its_own_cka_and_not_the_results():
    stream = STREAMS["classes"]
    spec = spec_for("plain", stream, network=f"{HERE}:borrowing")
    result = results_of([spec], stream)[0][spec.key]
    assert result.status == "finished"
    assert set(result.drift) == {"backbone.inner", "backbone.borrowed"}
    assert "backbone.inner" in result.cka


# What is refused


def test_a_fleet_takes_the_papers_names_or_refuses_them_in_one_line():
    """A spec made in Python may say "vanilla"; it is then uniform, or told so."""
    stream = STREAMS["classes"]
    try:
        spec = RunSpec(stream.name, stream.fingerprint, "vanilla", 0, strength=0.1, epochs=1)
        assert Fleet([spec], stream).run()[0].status == "finished"
    except MooringError as error:
        assert "uniform" in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "specs",
    [
        [],
        [spec_for("plain", STREAMS["classes"]), spec_for("plain", STREAMS["classes"], batch=3)],
        [spec_for("plain", STREAMS["classes"]), spec_for("joint", STREAMS["classes"])],
        [spec_for("ewc", STREAMS["classes"]), spec_for("mas", STREAMS["classes"])],
    ],
    ids=["none", "batches", "data", "outputs"],
)
def test_runs_of_several_shapes_are_refused_in_one_line(specs):
    with pytest.raises(MooringError, match="runs of one shape") as error:
        Fleet(specs, STREAMS["classes"])
    assert "\n" not in str(error.value)


def test_weights_that_are_not_here_are_refused_in_one_line():
    stream = STREAMS["classes"]
    with pytest.raises(MooringError, match="give --init with their file") as error:
        Fleet([spec_for("plain", stream, init="0123456789abcdef")], stream)
    assert "\n" not in str(error.value)
