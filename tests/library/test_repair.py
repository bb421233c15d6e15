"""Tests of the end of a task above its budget: the repair on two sides, its inputs, the return, and what is said."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mooring
from mooring.errors import ReturnedWarning
from mooring.hold import loss_scale
from mooring.hold.recent_inputs import KEPT_BATCHES
from mooring.hold.repair import PLAIN_STEPS
from mooring.reference.kinds import Classes

SIZE, CLASSES, BATCH = 12, 6, 32


def task(seed, count, noise=0.0):
    """Return batches whose labels a linear rule gives; rules of different seeds share a part."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(SIZE, CLASSES, generator=torch.Generator().manual_seed(99))
    rule = shared + 0.5 * torch.randn(SIZE, CLASSES, generator=generator)
    inputs = [torch.randn(BATCH, SIZE, generator=generator) for _ in range(count)]
    return [(x, (x @ rule).argmax(1)) for x in inputs]


def make_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model, optimizer, batches, call=None):
    for x, y in batches:
        optimizer.zero_grad()
        cross_entropy((call or model)(x), y).backward()
        optimizer.step()


def moored(nats=0.05, **options):
    model, optimizer = make_model()
    train(model, optimizer, task(1, 150))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pull = mooring.Budget(nats, average=False)
    moor = mooring.attach(model, optimizer, pull=pull, reference=[x for x, _ in task(1, 18)], **options)
    return model, optimizer, moor


@torch.no_grad()
def predictions(model, batches):
    return torch.cat([model(x) for x, _ in batches]).log_softmax(1)


def divergence(p, q):
    return float((p.exp() * (p - q)).sum(1).mean())


def straight_return(model, anchor, gauge, nats):
    """Return the model on the way from the anchor at the largest of 1,000 places that keeps the budget."""
    original, ends = predictions(anchor, gauge), copy.deepcopy(model)
    kept = copy.deepcopy(anchor)
    for place in range(1001):
        with torch.no_grad():
            for p, a, end in zip(kept.parameters(), anchor.parameters(), ends.parameters(), strict=True):
                p.copy_(a.lerp(end, place / 1000))
        if divergence(original, predictions(kept, gauge)) > nats:
            break
        best = copy.deepcopy(kept)
    return best


def blobs(seed, count):
    """Return batches of samples around eight centers, which differ between seeds."""
    generator = torch.Generator().manual_seed(seed)
    centers = 2 * torch.randn(8, 16, generator=generator)
    labels = [torch.randint(8, (BATCH,), generator=generator) for _ in range(count)]
    return [(centers[y] + torch.randn(BATCH, 16, generator=generator), y) for y in labels]


def test_repair_keeps_more_of_the_new_task_than_a_return(capsys):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 8))
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), blobs(1, 150))
    optimizer, pull = torch.optim.Adam(model.parameters(), lr=0.03), mooring.Budget(0.001, average=False)
    moor = mooring.attach(model, optimizer, pull=pull, reference=[x for x, _ in blobs(1, 18)])
    anchor, gauge, unseen = copy.deepcopy(model), blobs(1, 18)[::3], blobs(3, 80)[60:]
    train(model, optimizer, blobs(3, 60))
    assert moor.measured().nats > 0.002
    trained, returned = copy.deepcopy(model), straight_return(model, anchor, gauge, 0.001)
    assert moor.finish().nats <= 0.001
    assert divergence(predictions(anchor, gauge), predictions(model, gauge)) <= 0.001 * (1 + 1e-4)
    lost = [divergence(predictions(trained, unseen), predictions(m, unseen)) for m in (model, returned)]
    assert lost[0] < 0.6 * lost[1]
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert (
        f"mooring: more than 0.001 nats are measured: repairing, for about as long as {PLAIN_STEPS} steps take" in said
    )


def test_repair_passes_no_more_samples_than_so_many_training_steps():
    model, optimizer, moor = moored()
    train(model, optimizer, task(2, 60))
    samples = {True: 0, False: 0}

    def count(module, inputs):
        samples[torch.is_grad_enabled()] += len(inputs[0])

    handle = model.register_forward_pre_hook(count)
    moor.finish()
    handle.remove()
    measured_before_and_after = 2 * 6 * BATCH
    work = 3 * samples[True] + samples[False] - measured_before_and_after
    assert work <= 3 * PLAIN_STEPS * BATCH
    assert work > PLAIN_STEPS * BATCH  # it does repair


def test_nothing_is_repaired_or_said_within_the_budget(capsys):
    model, optimizer, moor = moored(nats=10.0)
    train(model, optimizer, task(2, 20))
    before = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moor.finish()
    assert capsys.readouterr().err == ""
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_a_return_gives_up_is_said_in_one_line():
    model, optimizer, moor = moored(nats=0.001, progress=False)
    train(model, optimizer, [(x, (y + 1) % CLASSES) for x, y in task(1, 60)])
    before = moor.measured().nats
    with pytest.warns(
        ReturnedWarning, match=r"gave up a part of what was learned: .* nats were measured and 0\.001"
    ) as said:
        assert moor.finish().nats <= 0.001
    assert before > 0.01
    assert "\n" not in str(said[0].message)


def test_progress_false_announces_nothing(capsys):
    model, optimizer, moor = moored(progress=False)
    train(model, optimizer, task(2, 60))
    moor.finish()
    assert capsys.readouterr().err == ""


def test_model_whose_parts_are_called_is_repaired_on_old_inputs_alone_and_that_is_said(capsys):
    model, optimizer, moor = moored()
    train(model, optimizer, task(2, 60), call=lambda x: model[2](model[1](model[0](x))))
    assert moor.measured().nats > 0.05
    assert moor.finish().nats <= 0.05
    assert "on old inputs alone, because no inputs of this task are known" in capsys.readouterr().err


def test_training_goes_on_from_the_unrepaired_model_as_if_it_had_not_been_finished():
    ends = []
    for checkpoints in (False, True):
        model, optimizer, moor = moored(progress=False)
        for step, batch in enumerate(task(2, 60)):
            train(model, optimizer, [batch])
            if checkpoints and step in (20, 40):
                before = copy.deepcopy(model.state_dict())
                with moor.finished() as measurement:
                    assert measurement.nats <= 0.05
                assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        moor.finish()
        ends.append(copy.deepcopy(model.state_dict()))
    assert all(torch.equal(ends[0][name], value) for name, value in ends[1].items())


def kept_inputs(moor):
    return list(moor._meter.recent._batches)


def test_inputs_of_the_last_steps_are_kept_but_not_those_of_evaluations():
    model, optimizer, moor = moored()
    new = task(2, 20)
    for batch in new:
        train(model, optimizer, [batch])
        with torch.no_grad():
            model(torch.zeros(3, SIZE))
        moor.measured()
    assert len(kept_inputs(moor)) == KEPT_BATCHES
    assert all(torch.equal(own, x) for own, (x, _) in zip(kept_inputs(moor), new[-KEPT_BATCHES:], strict=True))


def test_of_the_micro_batches_of_a_step_the_last_one_is_kept():
    model, optimizer, moor = moored()
    new = task(2, 6)
    for first, second in zip(new[::2], new[1::2], strict=True):
        optimizer.zero_grad()
        for x, y in (first, second):
            (cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
    assert all(torch.equal(own, x) for own, (x, _) in zip(kept_inputs(moor), new[1::2], strict=True))
    assert moor._meter.loss_scale.value == pytest.approx(1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_scale_of_a_loss_is_read_from_some_of_many_outputs(reduction, monkeypatch):
    torch.manual_seed(0)
    logits, labels = torch.randn(40, 30, 50, requires_grad=True), torch.randint(50, (40, 30))
    labels[:, :20] = -100
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)
    (gradient,) = torch.autograd.grad(loss, logits)
    monkeypatch.setattr(loss_scale, "MOST_OUTPUTS", 1 << 12)
    part = loss_scale.SomePredictions.of(Classes(), logits)
    assert len(part.rows) == len(part.rows.unique()) == 81
    scale = Classes().loss_scale(part.take(logits.detach()), part.take(gradient)) * part.share(gradient)
    assert float(scale) == pytest.approx(1 if reduction == "mean" else 400, rel=1e-4)


def test_inputs_that_a_loader_writes_over_are_copied():
    model, optimizer, moor = moored()
    buffer, new = torch.zeros(BATCH, SIZE), task(2, 4)
    for x, y in new:
        train(model, optimizer, [(buffer.copy_(x), y)])
    assert all(torch.equal(own, x) for own, (x, _) in zip(kept_inputs(moor), new, strict=True))


class Named(nn.Module):
    """A model with two inputs, of which a loop may pass one by position."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(SIZE, CLASSES)

    def forward(self, x, scale=None, **ignored):
        return self.layer(x if scale is None else x * scale)


@pytest.mark.parametrize("how", ["by position", "by name", "a mapping"])
def test_several_inputs_are_kept_by_name(how):
    torch.manual_seed(0)
    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    reference = [{"x": x, "scale": torch.ones(BATCH, 1)} for x, _ in task(1, 6)]
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.01), reference=reference, progress=False)
    calls = {
        "by position": lambda x: model(x, 2 * torch.ones(BATCH, 1)),
        "by name": lambda x: model(x, scale=2 * torch.ones(BATCH, 1)),
        "a mapping": lambda x: model(x=x, scale=2 * torch.ones(BATCH, 1), labels=x[:, 0]),
    }
    train(model, optimizer, task(2, 4), call=calls[how])
    assert all({"x", "scale"} <= own.keys() for own in kept_inputs(moor))
    recorded = moor._meter.recent.recorded(model)
    expected = model(task(2, 4)[0][0], 2 * torch.ones(BATCH, 1)).log_softmax(1)
    torch.testing.assert_close(recorded.targets[0][0], expected)


def test_inputs_of_training_are_in_no_saved_state():
    model, optimizer, moor = moored()
    (x, y) = task(2, 1)[0]
    train(model, optimizer, [(x, y)] * 20)
    saved = [tensor for tensor in moor.state_dict().values() if tensor.shape == x.shape]
    assert saved  # the inputs of the reference have this shape
    assert not any(torch.equal(tensor, x) for tensor in saved)


def test_detached_model_is_observed_no_more():
    model, _optimizer, moor = moored()
    moor.detach()
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
