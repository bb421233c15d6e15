"""Tests of the average of the parameters, at which a task ends if a measured budget has forgotten no more there."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

import mooring
from library.adapters.low_rank_nets import adapted_net, trainable
from library.two_heads import TwoHeads
from mooring.errors import MooringError
from mooring.testing.cases import check_equal

SIZE, CLASSES = 6, 4
EVERY, DECAY = 7, 0.98**7


def task(seed, count=21):
    """Return batches whose labels a linear rule of this seed gives."""
    generator = torch.Generator().manual_seed(seed)
    rule = torch.randn(SIZE, CLASSES, generator=generator)
    inputs = [torch.randn(16, SIZE, generator=generator) for _ in range(count)]
    return [(x, (x @ rule).argmax(1)) for x in inputs]


def moored(pull=None, kind=torch.optim.AdamW, dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = TwoHeads(SIZE, CLASSES).to(dtype)
    optimizer = kind(model.parameters(), lr=0.02)
    reference = [(x.to(dtype), y) for x, y in task(1, 9)]
    pull, options = pull or mooring.Budget(1.0, average=True), {"memory": mooring.Memory(), **options}
    moor = mooring.attach(model, optimizer, pull=pull, reference=reference, exclude="new", **options)
    model.head = "new"
    return model, optimizer, moor


def values(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train(model, optimizer, batches, average=None):
    """Train, and return the average of the parameters, continued from `average`, written by hand."""
    updates, average = average or (0, {})
    for step, (x, y) in enumerate(batches, 1):
        optimizer.zero_grad()
        cross_entropy(model(x.to(model.body.weight.dtype)), y).backward()
        optimizer.step()
        if step % EVERY == 0:
            decay = min(DECAY, (1 + updates) / (10 + updates)) if updates else 0.0
            average = {n: decay * average.get(n, 0.0) + (1 - decay) * p.double() for n, p in values(model).items()}
            updates += 1
    return updates, average


def check_close(model, expected, **tolerance):
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name].double(), **tolerance)


def averaged_names(moor):
    prefix = "gauge.average."
    return {key.removeprefix(prefix) for key in moor.state_dict() if key.startswith(prefix)}


@torch.no_grad()
def divergence(model, original):
    logits = []
    for module in (model, original):
        head, module.head = module.head, "old"
        logits.append(torch.cat([module(x) for x, _ in task(1, 9)[::3]]).log_softmax(1))
        module.head = head
    return float(kl_div(*logits, reduction="batchmean", log_target=True))


def test_end_of_a_task_takes_the_average_of_all_trained_parameters():
    model, optimizer, moor = moored()
    _, average = train(model, optimizer, task(2, 73))  # three steps after the last update
    last, raw = values(model), moor.measured().nats
    assert moor.finish().nats < raw
    check_close(model, average)
    assert not any(torch.equal(p, last[name]) for name, p in values(model).items() if not name.startswith("old"))


def test_divergence_that_is_measured_is_that_of_the_average():
    model, optimizer, moor = moored()
    original = copy.deepcopy(model)
    train(model, optimizer, task(2))
    assert moor.finish().nats == pytest.approx(divergence(model, original), rel=1e-4)


@pytest.mark.parametrize("nats", [1e-3, 1.0])
def test_last_parameters_stay_only_if_the_average_exceeds_the_budget_and_has_forgotten_more(nats):
    model, optimizer, moor = moored(mooring.Budget(nats, average=True))
    optimizer.param_groups[0]["lr"] = 0.1
    original = values(model)
    _, average = train(model, optimizer, task(2))
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.data.lerp_(original[name], 0.999)  # not a write that is seen: the average may replace it
    before, raw = values(model), moor.measured()
    assert raw.nats < 1e-3
    if nats < 1:
        assert moor.finish() == raw
        check_equal("parameters", values(model), before)
    else:
        assert raw.nats < moor.finish().nats <= nats
        check_close(model, average)


def test_return_to_the_budget_starts_at_the_average():
    """A loop that averages, puts the average in place and then finishes, written by hand."""
    nats, ends = 1e-3, []
    for average in (True, False):
        model, optimizer, moor = moored(mooring.Budget(nats, average=average))
        optimizer.param_groups[0]["lr"] = 0.1  # so that the budget is exceeded in training
        _, expected = train(model, optimizer, task(2))
        if average is False:
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(expected[name])
            assert moor.measured().nats > nats
        assert 0.9 * nats < moor.finish().nats <= nats
        ends.append(values(model))
    for name, p in ends[0].items():
        torch.testing.assert_close(p, ends[1][name], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ends[0]["new.weight"].double(), expected["new.weight"])


def test_finish_may_be_called_again():
    model, optimizer, moor = moored(mooring.Budget(1e-3, average=True))
    train(model, optimizer, task(2))
    finished = moor.finish()
    before = values(model)
    assert moor.finish() == finished
    check_equal("parameters", values(model), before)


def test_finished_restores_the_last_parameters_also_excluded_ones_and_the_average_goes_on():
    model, optimizer, moor = moored()
    average = train(model, optimizer, task(2))
    before, state = values(model), copy.deepcopy(moor.state_dict())
    with moor.finished():
        check_close(model, average[1])
    check_equal("parameters", values(model), before)
    check_equal("state", moor.state_dict(), state)
    _, expected = train(model, optimizer, task(3), average)
    moor.finish()
    check_close(model, expected)


def test_error_at_the_average_leaves_the_last_parameters():
    model, optimizer, moor = moored()
    train(model, optimizer, task(2))
    before, passes = values(model), []

    def fail(*_):
        passes.append(1)
        if len(passes) > len(task(1, 9)[::3]):  # the last parameters were measured
            raise RuntimeError("stopped")

    handle = model.register_forward_hook(fail)
    with pytest.raises(MooringError, match="stopped"):
        moor.finish()
    handle.remove()
    check_equal("parameters", values(model), before)


def test_new_task_starts_a_new_average():
    model, optimizer, moor = moored()
    train(model, optimizer, task(2))
    moor.consolidate()
    assert not averaged_names(moor)
    _, average = train(model, optimizer, task(3))
    moor.consolidate()
    check_close(model, average)


def test_one_point_is_no_average():
    model, optimizer, moor = moored()
    train(model, optimizer, task(2, 13))
    before = values(model)
    moor.finish()
    check_equal("parameters", values(model), before)


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("kind", "budget", "options", "averages"),
    [
        (torch.optim.AdamW, {}, {}, True),
        (torch.optim.RMSprop, {}, {}, True),
        (torch.optim.SGD, {}, {}, True),
        (torch.optim.SGD, {"average": True}, {}, True),
        (torch.optim.AdamW, {"average": False}, {}, False),
        (torch.optim.SGD, {"average": False}, {}, False),
        (torch.optim.AdamW, {"distil": False}, {}, True),
        (torch.optim.AdamW, {}, {"loss": loss}, True),
        (torch.optim.AdamW, {"measured": False, "average": True}, {}, False),
    ],
)
def test_parameters_are_averaged_by_default_wherever_forgetting_is_measured(kind, budget, options, averages):
    model, optimizer, moor = moored(mooring.Budget(1.0, **budget), kind, **options)
    train(model, optimizer, task(2, 14))
    assert averaged_names(moor) == ({name for name, _ in model.named_parameters()} if averages else set())


def test_short_task_ends_at_its_last_parameters_unless_it_must_average(monkeypatch):
    for fewest, moves in ((3, False), (2, True)):
        monkeypatch.setattr("mooring.hold.control.FEWEST_UPDATES", fewest)
        model, optimizer, moor = moored(mooring.Budget(1.0))
        train(model, optimizer, task(2, 3 * EVERY))  # a copy and two updates
        last = values(model)
        moor.finish()
        assert any(not torch.equal(p, last[name]) for name, p in model.named_parameters()) == moves


@pytest.mark.parametrize("average", ["yes", 1, 0.98])
def test_other_values_are_refused_in_one_line(average):
    with pytest.raises(MooringError) as error:
        mooring.Budget(0.1, average=average)
    assert str(error.value) == f"average={average!r} is not allowed: give True or False"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_average_has_the_dtype_of_the_parameters_or_float32(dtype):
    model, optimizer, moor = moored(dtype=dtype)
    _, average = train(model, optimizer, task(2))
    state = moor.state_dict()
    wide = torch.promote_types(dtype, torch.float32)
    for name, expected in average.items():
        kept = state[f"gauge.average.{name}"]
        assert kept.dtype == wide
        torch.testing.assert_close(kept.double(), expected, rtol=1e-6, atol=1e-7)
    moor.finish()
    check_equal("parameters", values(model), {name: state[f"gauge.average.{name}"].to(dtype) for name in average})


def run(interrupt=None):
    """Train two tasks; at the step `interrupt` of one save and load everything."""
    model, optimizer, moor = moored(mooring.Budget(0.02))
    for number, seed in enumerate((2, 3)):
        for step, batch in enumerate(task(seed, 24)):
            if (number, step) == interrupt:
                saved = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, moor)]
                model = TwoHeads(SIZE, CLASSES)
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                moor = mooring.attach(model, optimizer, exclude="new")
                for part, state in zip((model, optimizer, moor), saved, strict=True):
                    part.load_state_dict(state)
                model.head = "new"
            train(model, optimizer, [batch])
        moor.consolidate()
    return {**model.state_dict(), **moor.state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [(0, 5), (0, 7), (0, 22), (1, 0), (1, 16)])
def test_killed_and_resumed_equals_never_interrupted(interrupt):
    check_equal("resumed", run(interrupt), run())


def test_state_without_the_gauge_has_no_average_and_a_damaged_one_is_refused():
    model, optimizer, moor = moored()
    train(model, optimizer, task(2))
    assert not [key for key in moor.state_dict(gauge=False) if key.startswith("gauge.")]
    state = moor.state_dict()
    del state["gauge.average.new.bias"]
    with pytest.raises(MooringError, match=r"'gauge\.average\.new\.bias' is missing"):
        moor.load_state_dict(state)


def test_head_of_another_shape_starts_anew_when_a_state_is_loaded():
    model, optimizer, moor = moored()
    train(model, optimizer, task(2))
    state = copy.deepcopy(moor.state_dict())
    moor.detach()
    model.new = nn.Linear(16, CLASSES + 1)
    moor = mooring.attach(model, torch.optim.AdamW(model.parameters(), lr=0.02), exclude="new")
    moor.load_state_dict(state)
    assert averaged_names(moor) == {"body.weight", "body.bias", "old.weight", "old.bias"}


def test_parameters_that_are_added_start_later_and_frozen_ones_stay_as_they_are():
    model, optimizer, moor = moored()
    train(model, optimizer, task(2))
    model.body.bias.requires_grad_(False)
    model.new.bias.requires_grad_(False)
    for p in (model.body.bias, model.new.bias):
        p.grad = None
    model.new.shift = nn.Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [model.new.shift]})
    frozen = {name: model.get_parameter(name).detach().clone() for name in ("body.bias", "new.bias")}
    points = []
    for batch in task(3):
        optimizer.zero_grad()
        (cross_entropy(model(batch[0]), batch[1]) + (model.new.shift - 1).square().sum()).backward()
        optimizer.step()
        if moor.steps % EVERY == 0:
            points.append(model.new.shift.detach().clone())
    moor.finish()
    expected = points[0]
    for updates, point in enumerate(points[1:], 1):
        expected = expected + (1 - (1 + updates) / (10 + updates)) * (point - expected)
    torch.testing.assert_close(model.new.shift.detach(), expected)
    check_equal("frozen", {name: model.get_parameter(name).detach() for name in frozen}, frozen)
    assert averaged_names(moor) == {name for name, _ in model.named_parameters()} - frozen.keys()


def test_parameters_without_a_gradient_keep_their_value_to_the_bit():
    model, optimizer, moor = moored(mooring.Budget(1.0, distil=False, average=True))
    before = values(model.old)
    train(model, optimizer, task(2, 140))
    moor.finish()
    check_equal("the old head", values(model.old), before)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_rebind_in_the_middle_equals_a_new_mooring_with_the_loaded_state(kind):
    ends = []
    for how in ("rebind", "state"):
        model, optimizer, moor = moored(mooring.Budget(10.0))  # without a repair, for which a state has no inputs
        train(model, optimizer, task(2))
        optimizer = kind(model.parameters(), lr=0.01)
        if how == "rebind":
            moor.rebind(optimizer)
        else:
            state = moor.state_dict()
            moor.detach()
            moor = mooring.attach(model, optimizer, exclude="new")
            moor.load_state_dict(state)
        train(model, optimizer, task(3))
        assert averaged_names(moor)
        moor.finish()
        ends.append({**values(model), **moor.state_dict()})
    check_equal("rebound", *ends)


def test_optimizer_of_some_parameters_averages_those_alone():
    model, optimizer, moor = moored()
    train(model, optimizer, task(2))
    moor.rebind(torch.optim.AdamW([*model.body.parameters(), *nn.Linear(2, 2).parameters()], lr=0.02))
    before = values(model.new)
    train(model, moor.optimizer, task(3))
    assert averaged_names(moor) == {"body.weight", "body.bias"}
    moor.finish()
    check_equal("the new head", values(model.new), before)


def test_factors_of_adapters_are_averaged_separately():
    model = adapted_net(base=nn.Linear)
    optimizer = torch.optim.Adam(trainable(model), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 4, generator=generator) for _ in range(30)]
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(1.0, average=True), reference=batches[:9])
    points = []
    for step, x in enumerate(batches[9:], 1):
        optimizer.zero_grad()
        cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        if step % EVERY == 0:
            points.append([p.detach().clone() for p in trainable(model)])
    moor.finish()
    for index, p in enumerate(trainable(model)):
        first, second, third = (point[index] for point in points)
        torch.testing.assert_close(p.detach(), 3 / 12 * (2 / 11 * first + 9 / 11 * second) + 9 / 12 * third)
    assert {name.rpartition(".")[2] for name in averaged_names(moor)} == {
        name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad
    }
