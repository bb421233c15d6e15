"""Tests of budgets that are measured on held-out data: what is measured, kept, saved, resumed and refused."""

import copy
import warnings
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import mooring
from library.two_heads import TwoHeads
from mooring.errors import MooringError, NonFiniteError, UnheldWarning
from mooring.hold.recent_inputs import RecentInputs
from mooring.rules import Kronecker
from mooring.testing.cases import check_equal

SIZE, CLASSES = 6, 4


def task(seed, count=12):
    """Return batches of inputs with labels that a linear rule of this seed gives."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(SIZE, CLASSES, generator=generator)
    inputs = [torch.randn(16, SIZE, generator=generator) for _ in range(count)]
    return [(x, (x @ rule).argmax(1)) for x in inputs]


def make_model(outputs=CLASSES):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, outputs))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model, optimizer, batches, epochs=1, loss=cross_entropy):
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()


@cache
def pretrained_weights():
    model, optimizer = make_model()
    train(model, optimizer, task(1), epochs=10)
    return model.state_dict()


def pretrained():
    weights = pretrained_weights()
    model, optimizer = make_model()
    model.load_state_dict(weights)
    return model, optimizer


@torch.no_grad()
def divergence(model, original, batches):
    """Return the mean over samples of sum(p * log(p / q)), written by hand."""
    p, q = (torch.cat([m.eval()(x) for x, _ in batches]).softmax(1) for m in (original, model))
    model.train()
    return float((p * (p / q).log()).sum(1).mean())


def test_measured_value_is_the_divergence_on_every_third_batch_of_the_reference():
    model, optimizer = pretrained()
    original, reference = copy.deepcopy(model), task(1)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1), reference=reference)
    assert moor.measured().nats == pytest.approx(0, abs=1e-7)
    train(model, optimizer, task(2))
    measurement = moor.measured()
    assert measurement.nats == pytest.approx(divergence(model, original, reference[::3]), rel=1e-4)
    assert measurement.samples == 64
    assert 0 < measurement.standard_error < measurement.nats
    assert "forgetting=measured" in repr(moor)


ACCUMULATED = {"memory": mooring.Memory()}
"""For tasks that end without data."""

KRONECKER = {"importance": Kronecker(), **ACCUMULATED}


@pytest.mark.parametrize("options", [ACCUMULATED, KRONECKER], ids=["diagonal", "kronecker"])
@pytest.mark.parametrize("distil", [False, True])
def test_budget_is_kept_on_the_gauge_at_the_end_of_a_task(options, distil):
    kept = []
    for nats in (0.03, 0.3):
        model, optimizer = pretrained()
        original, reference = copy.deepcopy(model), task(1)
        pull = mooring.Budget(nats, distil=distil)
        moor = mooring.attach(model, optimizer, pull=pull, reference=reference, **options)
        train(model, optimizer, task(2), epochs=4)
        forgotten = moor.consolidate()
        kept.append(divergence(model, original, reference[::3]))
        assert forgotten.nats == pytest.approx(kept[-1], rel=1e-4)
        assert kept[-1] <= nats * (1 + 1e-4)
        assert kept[-1] >= 0.2 * nats
        assert moor.measured().nats == pytest.approx(0, abs=1e-7)  # of the next task
    assert kept[0] < kept[1]


def test_consolidate_returns_nothing_where_nothing_is_measured():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1, measured=False))
    train(model, optimizer, task(1))
    assert moor.consolidate() is None
    train(model, optimizer, task(2))
    assert moor.consolidate() is None


def test_plain_fine_tuning_would_exceed_the_budgets_of_these_tests():
    model, optimizer = pretrained()
    original = copy.deepcopy(model)
    train(model, optimizer, task(2), epochs=4)
    assert divergence(model, original, task(1)[::3]) > 1


@pytest.mark.filterwarnings("ignore:.*saw no step")  # see test_coverage.py
def test_finish_keeps_the_budget_in_place_and_finished_restores_the_parameters():
    model, optimizer = pretrained()
    pull = mooring.Budget(0.05, distil=False)
    moor = mooring.attach(model, optimizer, pull=pull, reference=task(1))
    with torch.no_grad():
        model[0].weight.mul_(3)  # no pull has seen this
    before = {name: p.clone() for name, p in model.state_dict().items()}
    assert moor.measured().nats > 0.05
    with moor.finished() as measurement:
        assert measurement.nats <= 0.05
        assert moor.measured().nats == pytest.approx(measurement.nats, rel=1e-5)
    check_equal("parameters", model.state_dict(), before)
    finished = moor.finish()
    assert moor.measured() == finished
    assert 0.03 < finished.nats <= 0.05
    assert moor.finish() == finished


def test_rise_of_a_given_loss_is_measured_and_kept():
    model, optimizer = make_model(outputs=1)

    def loss(model, batch):
        return mse_loss(model(batch[0]).squeeze(1), batch[1])

    def regression(seed):
        return [(x, x @ torch.linspace(-seed, seed, SIZE)) for x, _ in task(seed)]

    def step(batches, epochs):
        for _ in range(epochs):
            for batch in batches:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()

    step(regression(1), 10)
    reference = regression(1)
    before = sum(loss(model.eval(), batch).item() for batch in reference[::3]) / 4
    moor = mooring.attach(
        model.train(), optimizer, pull=mooring.Budget(0.05), reference=reference, loss=loss, memory=mooring.Memory()
    )
    step(regression(2), 3)
    assert "units of the loss on 4 batches, after a repair" in str(moor.consolidate())
    assert sum(loss(model.eval(), batch).item() for batch in reference[::3]) / 4 - before <= 0.05 * (1 + 1e-4)


def test_prompts_count_although_their_labels_are_ignored_and_padding_does_not():
    torch.manual_seed(0)
    model = nn.Embedding(8, 8)
    tokens = torch.randint(8, (4, 5))
    tokens[:, 3:] = 5  # padding, which only the labels show
    labels = tokens.roll(-1, 1).clone()
    labels[:, 3:] = -100
    labels[:, 0] = -100  # the prompt
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=[(tokens, labels)] * 4)
    p = model.weight.detach().softmax(1)
    with torch.no_grad():
        model.weight.add_(torch.randn(8, 8))
    divergences = (p * (p.log() - model.weight.detach().log_softmax(1))).sum(1)[tokens]
    assert moor.measured().nats == pytest.approx(float(divergences[:, :3].mean()), rel=1e-5)


def run(interrupt=None, kind=None, data=False):
    """Train two tasks after a reference; with `interrupt`, save and load everything at that step."""
    model, optimizer = pretrained()
    optimizer = kind(model.parameters(), lr=0.01) if kind else optimizer
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.05), reference=task(1), **ACCUMULATED)
    for number, seed in enumerate((2, 3)):
        for step, (x, y) in enumerate(task(seed, 20)):
            if (number, step) == interrupt:
                saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, moor)]
                random = torch.get_rng_state()
                model, optimizer = make_model()
                optimizer = kind(model.parameters(), lr=0.01) if kind else optimizer
                torch.set_rng_state(random)
                moor = mooring.attach(model, optimizer)
                for part, state in zip((model, optimizer, moor), saved, strict=True):
                    part.load_state_dict(state)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        moor.consolidate(data=task(seed, 6) if data else None)
    return {**model.state_dict(), **{f"moor.{name}": t for name, t in moor.state_dict().items()}}


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [(0, 2), (0, 4), (1, 0)])
def test_killed_and_resumed_equals_never_interrupted(interrupt):
    check_equal("resumed", run(interrupt), run())


@pytest.mark.slow
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("kind", [None, torch.optim.Adam])
def test_resumed_in_a_second_task_with_or_without_data_of_the_first_equals_never_interrupted(kind, data):
    check_equal("resumed", run((1, 4), kind, data), run(None, kind, data))


@pytest.mark.slow
def test_resumed_just_before_the_end_keeps_the_budget_with_the_inputs_since_then(monkeypatch):
    """The inputs of training are in no saved state, so a repair has those of the steps since it was loaded."""
    kept, recorded = [], RecentInputs.recorded

    def observe(self, model):
        gauge = recorded(self, model)
        kept.append(len(gauge) if gauge else 0)
        return gauge

    monkeypatch.setattr(RecentInputs, "recorded", observe)
    run((0, 15))
    assert kept[0] == 5


def test_state_without_the_gauge_has_no_data_and_continues_with_the_estimate():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, reference=task(1))
    state = moor.state_dict(gauge=False)
    assert not [key for key in state if key.startswith("gauge.")]
    other = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    other.load_state_dict(state)
    assert "forgetting=estimated" in repr(other)
    with pytest.raises(MooringError, match="only estimated"):
        other.measured()


def test_pull_that_waited_for_distillation_holds_once_nothing_is_measured():
    """Distillation holds the reference; without the gauge the pull is all there is."""
    model, _ = pretrained()
    moor = mooring.attach(
        model, torch.optim.Adam(model.parameters(), lr=0.05), pull=mooring.Budget(1e-3), reference=task(1)
    )
    state = moor.state_dict(gauge=False)
    moor.detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    other = mooring.attach(model, optimizer, pull=mooring.Budget(1e-3))
    other.load_state_dict(state)
    train(model, optimizer, task(2))
    assert 0.9e-3 < other.pull_energy() <= 1e-3 * (1 + 1e-5)


def distilling(nats=1e-3, **options):
    """Return a model whose budget is held by distillation, so that the pull does not act."""
    model, _ = pretrained()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(nats), reference=task(1), **options)
    return model, optimizer, moor


def test_pull_that_waited_holds_if_the_state_is_loaded_into_a_budget_that_is_not_measured():
    model, _, moor = distilling()
    moor.detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    other = mooring.attach(model, optimizer, pull=mooring.Budget(1e-3, measured=False))
    other.load_state_dict(moor.state_dict())
    train(model, optimizer, task(2))
    assert 0.9e-3 < other.pull_energy() <= 1e-3 * (1 + 1e-5)


@pytest.mark.parametrize(("kind", "lr"), [(torch.optim.SGD, 0.2), (torch.optim.AdamW, 0.01)])
def test_pull_does_not_act_where_all_past_tasks_are_distilled(kind, lr):
    model, _ = pretrained()
    optimizer = kind(model.parameters(), lr=lr)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(1e-3), reference=task(1), **ACCUMULATED)
    train(model, optimizer, task(2))
    assert moor.pull_energy() > 2e-3
    assert moor._step.budget.scale == 1
    moor.consolidate()  # a task without data is held by the estimate
    train(model, optimizer, task(3))
    assert moor.pull_energy() <= 2e-3 * (1 + 1e-3)


def test_rebound_optimizer_keeps_the_scale_that_was_measured_before():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(1e-3, distil=False), reference=task(1))
    train(model, optimizer, task(2))
    scale = moor._step.budget.scale
    assert scale != 1
    moor.rebind(torch.optim.AdamW(model.parameters(), lr=0.05))
    assert moor._step.budget.scale == scale


def test_budget_of_0_ends_at_the_anchor():
    model, optimizer, moor = distilling(nats=0.0)
    train(model, optimizer, task(2)[:3])
    assert moor.finish().nats <= 0
    assert moor.drift() == pytest.approx(dict.fromkeys(moor.drift(), 0), abs=1e-9)


@pytest.mark.parametrize("distil", [False, None])
def test_several_past_tasks_are_each_measured(distil):
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.05, distil=distil), reference=task(1), **ACCUMULATED)
    train(model, optimizer, task(2), epochs=3)
    moor.consolidate(data=task(2)[:4])
    original = copy.deepcopy(model)
    train(model, optimizer, task(3), epochs=3)
    moor.finish()
    second = task(2)[:4] if distil is False else task(2)[:4:3]  # the others are distilled
    values = [divergence(model, original, batches) for batches in (task(1)[::3], second)]
    expected = sum(values) / 2
    assert moor.measured().nats == pytest.approx(expected, rel=1e-3)
    assert expected <= 0.05 * (1 + 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_task_without_data_is_held_by_the_estimate(kind):
    def third_task(**options):
        model, _ = pretrained()
        optimizer = kind(model.parameters(), lr=0.01)
        moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.05), reference=task(1), **ACCUMULATED)
        train(model, optimizer, task(2), epochs=10)
        moor.consolidate(**options)
        second = copy.deepcopy(model)
        train(model, optimizer, task(3), epochs=10)
        spent = moor.pull_energy() / moor.pull.allowed(2)
        moor.finish()
        return spent, divergence(model, second, task(2))

    (spent, forgotten), (spent_with_data, _) = third_task(), third_task(data=task(2))
    assert 0 < spent <= 1 + 1e-3
    assert forgotten <= 0.1
    if kind is torch.optim.Adam:
        assert spent_with_data > 5  # both tasks are measured and distilled, and the pull does not act


def adam_task(moor_options, **ends):
    """Train a first task with Adam, end it by `ends`, and return the model, its optimizer and the Mooring."""
    model, _ = pretrained()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    moor = mooring.attach(model, optimizer, **{"pull": mooring.Budget(0.05), **ACCUMULATED, **moor_options})
    train(model, optimizer, task(2), epochs=3)
    moor.consolidate(**ends)
    return model, optimizer, moor


@pytest.mark.slow
@pytest.mark.parametrize("how", ["without data", "without the gauge", "outputs changed", "estimated without a step"])
@pytest.mark.filterwarnings("ignore")
def test_estimate_holds_as_long_as_a_past_task_has_no_gauge(how):
    if how == "without data":
        model, optimizer, moor = adam_task({})
    else:
        model, optimizer, moor = adam_task({"reference": task(1), "exclude": "3"}, data=task(2))
    if how == "without the gauge":
        moor.load_state_dict(moor.state_dict(gauge=False))
    elif how == "outputs changed":
        with torch.no_grad():
            model[-1].weight.normal_()
    elif how == "estimated without a step":
        moor.estimate(task(3))
        moor.consolidate()
    train(model, optimizer, task(3), epochs=3)
    moor.consolidate(data=task(3))
    train(model, optimizer, task(4), epochs=3)
    assert 0 < moor.pull_energy() <= float(moor.pull.allowed(moor.tasks)) * (1 + 1e-3)


@pytest.mark.parametrize(
    ("measured", "scale"), [(0.004, 1.0), (0.006, 1.0), (10.0, None), (1e9, 0.01), (float("inf"), 1.0)]
)
def test_estimate_of_a_task_without_data_is_corrected_by_the_measured_value_within_limits(measured, scale):
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.05), reference=task(1))
    train(model, optimizer, task(2))
    with torch.no_grad():
        model[0].weight.mul_(2)
    spent = moor.pull_energy() / 0.05
    moor._meter.hold_by_estimate(measured)
    fitting = spent * 0.05 / measured if scale is None else scale
    assert moor._meter.largest_scale == pytest.approx(fitting)
    assert scale is not None or 0.01 < fitting < 1


def test_budget_of_0_is_consolidated_although_an_excluded_layer_moved():
    with pytest.warns(UnheldWarning, match="cannot be kept"):
        _, _, moor = adam_task({"reference": task(1), "exclude": "3", "pull": mooring.Budget(0.0)})
    assert moor.tasks == 2


def test_consolidation_that_fails_leaves_what_is_distilled_as_it_was(monkeypatch):
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, reference=task(1))
    train(model, optimizer, task(2))

    def fail(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as during:
        during.setattr("mooring.hold.measured_budget.MeasuredBudget.finish", fail)
        with pytest.raises(KeyboardInterrupt):
            moor.consolidate(data=task(2))
    moor.consolidate(data=task(2))
    assert [len(reference.batches) > 0 for reference in moor._meter.distillation.references] == [True, True]


@pytest.mark.parametrize("batch", [0, 1])  # measured, and distilled
def test_batch_after_training_that_does_not_fit_is_named(batch):
    model, optimizer = make_model()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    train(model, optimizer, task(2))
    data = task(2)
    data[batch] = torch.zeros(16, SIZE + 1), data[batch][1]
    with pytest.raises(MooringError, match=rf"^batch {batch} of the data or reference does not fit the model \(mat1"):
        moor.consolidate(data=data)


def test_weight_of_distillation_starts_again_in_each_task():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(1e-3), reference=task(1), **ACCUMULATED)
    train(model, optimizer, task(2), epochs=3)
    assert float(moor._meter.distillation.weight) > 1
    moor.consolidate()
    assert float(moor._meter.distillation.weight) == 1


def test_tasks_take_turns_in_distillation():
    first, second, third = ([(x.double(), y) for x, y in task(seed)] for seed in (1, 2, 3))
    model = pretrained()[0].double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(100.0, distil=True), reference=first)
    train(model, optimizer, second)
    moor.consolidate(data=second)
    anchor = copy.deepcopy(model).eval()
    train(model, optimizer, third[:1])  # at the anchor the divergence has no gradient
    optimizer.param_groups[0]["lr"] = 1e-6
    for step, (old, _) in enumerate((second[1], first[2], second[2]), 1):  # first[1] had its turn; [0] is measured
        before = copy.deepcopy(model).eval()
        train(model, optimizer, third[step : step + 1])
        p = anchor(old).softmax(1).detach()
        value = (p * (p.log() - before(old).log_softmax(1))).sum(1).mean()
        added = torch.autograd.grad(value, list(before.parameters()))
        for parameter, start, g in zip(model.parameters(), before.parameters(), added, strict=True):
            torch.testing.assert_close((start - parameter) / 1e-6 - parameter.grad, 2 * g, rtol=1e-4, atol=1e-5)


def test_one_batch_serves_as_gauge_too():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.02), reference=task(1)[:1])
    train(model, optimizer, task(2), epochs=3)
    assert moor.finish().nats <= 0.02


def test_certain_model_is_measured_without_errors():
    model, optimizer = pretrained()
    with torch.no_grad():
        model[-1].weight.mul_(1000)
        model[-1].bias.mul_(1000)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.02), reference=task(1))
    assert moor.measured().nats == 0
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    train(model, optimizer, task(2))
    assert moor.finish().nats <= 0.02


def test_non_deterministic_model_warns_and_a_budget_that_cannot_be_kept_is_named():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(SIZE, CLASSES)

        def forward(self, x):
            return self.layer(x) + torch.randn(len(x), CLASSES)

    torch.manual_seed(0)
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.warns(UserWarning, match="outputs differ from call to call"):
        moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.01, distil=False), reference=task(1))
    train(model, optimizer, task(2))
    with pytest.warns(UnheldWarning, match="cannot be kept: at the anchor itself"):
        moor.finish()


def test_outputs_that_are_not_finite_on_the_gauge_are_refused_and_nothing_changes():
    model, optimizer = pretrained()
    reference = task(1)
    reference[3][0][0, 0] = torch.inf
    with pytest.raises(NonFiniteError) as error:
        mooring.attach(model, optimizer, reference=reference)
    assert "\n" not in str(error.value)


def test_gradient_that_is_not_finite_stops_before_the_step():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, reference=task(1))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(NonFiniteError):
        train(model, optimizer, [(torch.full((4, SIZE), torch.nan), torch.zeros(4, dtype=torch.int64))])
    check_equal("parameters", model.state_dict(), before)
    assert moor.steps == 0


def test_head_that_is_switched_after_the_reference_is_measured_with_the_old_one():
    torch.manual_seed(0)
    model = TwoHeads(SIZE, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer, task(1), epochs=5)
    original = copy.deepcopy(model)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.02), reference=task(1), exclude="new")
    model.head = "new"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, task(2), epochs=5)
    measured = moor.measured().nats
    assert model.head == "new"
    model.head = "old"
    assert measured == pytest.approx(divergence(model, original, task(1)[::3]), rel=1e-3)


def test_weights_that_change_before_the_first_step_end_the_measurement_with_a_warning():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, reference=task(1), exclude="3")
    with torch.no_grad():
        model[-1].weight.normal_()
    with pytest.warns(UnheldWarning, match="changed by .* nats before the first step"):
        train(model, optimizer, task(2)[:1])
    assert "forgetting=estimated" in repr(moor)
    with pytest.raises(
        MooringError, match=r"outputs changed between attach\(\) .*: load or reset weights before attach"
    ):
        moor.finish()
    moor.consolidate(data=task(2))
    assert moor.measured().nats == 0


def test_state_says_whether_the_measurement_was_ended():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, reference=task(1), exclude="3")
    weights, measured = copy.deepcopy(model.state_dict()), moor.state_dict()
    with torch.no_grad():
        model[-1].weight.normal_()
    with pytest.warns(UnheldWarning, match="changed by .* nats before the first step"):
        train(model, optimizer, task(2)[:1])
    stopped = moor.state_dict()
    model.load_state_dict(weights)
    moor.load_state_dict(measured)
    assert moor.measured().nats == 0
    moor.load_state_dict(stopped)
    with pytest.raises(MooringError, match=r"outputs changed between attach\(\)"):
        moor.measured()


def test_outputs_of_another_shape_before_the_first_step_end_the_measurement_with_a_warning():
    model, optimizer = pretrained()
    mooring.attach(model, optimizer, reference=task(1), exclude="3")
    model[-1] = nn.Linear(model[-1].in_features, 9)
    with pytest.warns(UnheldWarning, match="outputs on past data changed before the first step"):
        train(model, optimizer, task(2)[:1])


def test_model_of_another_dtype_than_the_reference_is_refused_at_the_first_step():
    model, optimizer = pretrained()
    mooring.attach(model, optimizer, reference=task(1))
    model.to(torch.bfloat16)
    with pytest.raises(
        MooringError, match=r"does not take the data or reference any more .*: change its layers or its dtype, as in"
    ):
        train(model, optimizer, [(x.to(torch.bfloat16), y) for x, y in task(2)[:1]])


def test_error_without_a_message_on_past_data_is_named_by_its_class(monkeypatch):
    model, optimizer = pretrained()
    mooring.attach(model, optimizer, reference=task(1))

    def fail(x):
        raise NotImplementedError

    x, y = task(2)[0]
    nn.functional.cross_entropy(model(x), y).backward()
    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(MooringError, match=r"any more \(NotImplementedError\): change its layers"):
        optimizer.step()


def test_measuring_and_distilling_leave_the_importance_and_the_mode_as_they_are():
    moors = []
    for measured in (True, False):
        model, optimizer = pretrained()
        reference = task(1)[:3]  # too few to hold any out
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        pull = mooring.Budget(1e9, measured=measured)
        options = {"importance": Kronecker(), "pull": pull, "reference": reference}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            moors.append(mooring.attach(model, optimizer, **options))
        train(model, optimizer, task(2)[:1])
        assert all(module.training for module in model.modules())
    for name, scores in moors[0].current.items():
        torch.testing.assert_close(scores, moors[1].current[name])


def test_distillation_adds_the_gradient_of_the_divergence_on_the_other_batches():
    model, optimizer = pretrained()
    reference = task(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    original = copy.deepcopy(model).eval()
    mooring.attach(model, optimizer, pull=mooring.Budget(1e6, distil=True), reference=reference)
    train(model, optimizer, task(2)[:1])  # at the anchor the divergence has no gradient
    current = copy.deepcopy(model)
    x, y = task(2)[1]
    for module in (model, current):
        torch.manual_seed(5)
        module.zero_grad()
        cross_entropy(module(x), y).backward()
    step = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    old = reference[2][0]  # the batches 1, 2, 4, 5, ... are distilled in turn
    p = original(old).softmax(1).detach()
    value = (p * (p.log() - current.eval()(old).log_softmax(1))).sum(1).mean()
    added = dict(zip(step, torch.autograd.grad(value, list(current.parameters())), strict=True))
    for name, parameter in model.named_parameters():
        expected = current.get_parameter(name) - 0.05 * (step[name] + added[name])
        torch.testing.assert_close(parameter, expected)
        assert torch.equal(parameter.grad, step[name])


def after_a_step(loss, **changes):
    """Return the gradient that a second step adds to the task's, that of the divergence by hand, and the task's."""
    model, _ = pretrained()
    model.double()
    batches = [(x.double(), y) for x, y in task(1)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    original = copy.deepcopy(model).eval()
    mooring.attach(model, optimizer, pull=mooring.Budget(100.0, distil=True), reference=batches)
    data = [(x.double(), y) for x, y in task(2)]
    train(model, optimizer, data[:1], loss=loss)  # at the anchor the divergence has no gradient
    current = copy.deepcopy(model)
    optimizer.param_groups[0].update(lr=1e-6)
    for x, y in data[1:2]:
        optimizer.zero_grad()
        loss(model(x), y).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(changes.get("shrunk", 1.0))
        optimizer.step()
    old = batches[2][0]
    p = original(old).softmax(1).detach()
    value = (p * (p.log() - current.eval()(old).log_softmax(1))).sum(1).mean()
    by_hand = torch.cat([g.flatten() for g in torch.autograd.grad(value, list(current.parameters()))])
    pairs = zip(model.parameters(), current.parameters(), strict=True)
    added = torch.cat([((before - now) / 1e-6 - now.grad).flatten() for now, before in pairs])
    return added, by_hand, torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1), ("sum", 16)])
def test_distillation_has_the_scale_of_the_loss(reduction, scale):
    """A nat of a summed loss of 16 samples is worth 16 nats of a mean one, and so is a nat of old divergence."""
    added, by_hand, own = after_a_step(lambda outputs, labels: cross_entropy(outputs, labels, reduction=reduction))
    assert scale * by_hand.norm() < own.norm()
    torch.testing.assert_close(added, scale * by_hand, rtol=1e-4, atol=1e-5)


def test_added_gradient_is_no_longer_than_the_tasks_was_in_the_last_steps():
    added, by_hand, own = after_a_step(cross_entropy, shrunk=1e-3)
    first_step = after_a_step(cross_entropy)[2].norm()  # nearly as long as that of the step before
    assert own.norm() < 0.05 * by_hand.norm()  # the present norm is no limit
    assert added.norm() <= 3 * first_step
    torch.testing.assert_close(added / added.norm(), by_hand / by_hand.norm(), rtol=1e-3, atol=1e-5)


def test_loss_that_is_no_cross_entropy_has_the_scale_1():
    added, by_hand, _ = after_a_step(lambda outputs, labels: 5 * outputs.square().mean())
    torch.testing.assert_close(added, by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batches", [1, 2])
def test_few_batches_are_held_out_by_rows(batches):
    model, optimizer = pretrained()
    seen, known = (
        [],
        [(torch.cat([x for x, _ in task(n, 3)]), torch.cat([y for _, y in task(n, 3)])) for n in range(batches)],
    )
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1, distil="unmixed"), reference=known)
    model.register_forward_pre_hook(lambda module, inputs: None if module.training else seen.append(inputs[0]))
    moor.measured()
    measured = torch.cat(seen)
    seen.clear()
    train(model, optimizer, task(2)[:2])  # the second step distils
    assert measured.equal(torch.cat([x[::3] for x, _ in known]))
    assert not any((measured == row).all(1).any() for row in torch.cat(seen[1:]))  # the first checks the start


def test_small_reference_is_measured_and_distilled_as_a_whole():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1), reference=[(x[:8], y[:8]) for x, y in task(1, 3)])
    assert moor.measured().samples == 24


def test_weight_of_distillation_follows_what_is_measured_and_never_falls_below_1():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(1e-3), reference=task(1))
    train(model, optimizer, task(2), epochs=2)
    weight = float(moor._meter.distillation.weight)
    assert weight > 2
    train(model, optimizer, task(2))
    assert moor.running_forgetting > 1e-3
    assert float(moor._meter.distillation.weight) > weight
    optimizer.param_groups[0]["lr"] = 0.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(moor.anchor[name])
    train(model, optimizer, task(2), epochs=9)
    assert float(moor._meter.distillation.weight) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measured": 1}, "measured=1 is not allowed"),
        ({"distil": "yes"}, "distil='yes' is not allowed"),
    ],
)
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(MooringError, match=message):
        mooring.Budget(0.1, **options)


def test_measurements_cost_at_most_a_twentieth_of_the_passes_of_training():
    model, optimizer = pretrained()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.05, distil=False), reference=task(1))
    passes = []
    model.register_forward_hook(lambda *_: passes.append(model.training))
    train(model, optimizer, task(2, 20), epochs=7)
    assert passes.count(True) == moor.steps == 140
    assert passes.count(False) - 1 <= 0.05 * 3 * 140  # a step costs three forward passes; one checks the start


@pytest.mark.parametrize("exclude", ["new", ()])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.filterwarnings("ignore:training moves parameters")
def test_steps_of_a_head_that_old_outputs_do_not_depend_on_distil_nothing(kind, exclude):
    model = TwoHeads(SIZE, CLASSES)
    optimizer = kind(model.parameters(), lr=0.1)
    pull = mooring.Budget(0.1, distil=True)
    moor = mooring.attach(model, optimizer, pull=pull, reference=task(1), exclude=exclude, progress=False)
    model.head = "new"
    model.body.requires_grad_(False)
    before = model.new.weight.detach().clone()
    train(model, optimizer, task(2)[:3])
    assert not torch.equal(model.new.weight, before)
    assert moor.measured().nats == 0


def test_training_after_a_reference_accumulates_nothing_and_a_second_task_needs_data():
    results = []
    for options in ({}, ACCUMULATED):
        model, _ = pretrained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        moor = mooring.attach(model, optimizer, reference=task(1), **options)
        train(model, optimizer, task(2), epochs=2)
        assert any(bool(score.any()) for score in moor.current.values()) == bool(options)
        assert moor.needs_data == (not options)
        moor.finish()
        results.append(moor)
    check_equal("finished", results[0].model.state_dict(), results[1].model.state_dict())
    unaccumulated, accumulated = results
    with pytest.raises(MooringError, match=r"this task has no importance.*give consolidate\(data=...\)") as error:
        unaccumulated.consolidate()
    assert "\n" not in str(error.value)
    unaccumulated.consolidate(data=task(2))
    accumulated.consolidate()
    assert [moor.tasks for moor in results] == [2, 2]
