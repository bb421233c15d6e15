"""Tests of models that keep something from pass to pass, of threads, and of what used to fail with an unclear error."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import mooring
from by_hand import one_line
from mooring.errors import MooringError, UnheldWarning

SIZE, CLASSES, ROWS = 8, 4, 32


def inputs(count=8):
    return list(torch.randn(count, ROWS, SIZE, generator=torch.Generator().manual_seed(0)))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def step(model, optimizer, x):
    optimizer.zero_grad()
    cross_entropy(model(x), torch.arange(len(x)) % CLASSES).backward()
    optimizer.step()


class Hidden(nn.Module):
    """A recurrent model that keeps its hidden state in an attribute, as in truncated backpropagation through time."""

    def __init__(self):
        super().__init__()
        self.net, self.recurrent, self.state = mlp(), nn.Linear(CLASSES, CLASSES), None

    def forward(self, x):
        new = self.net(x) + (0 if self.state is None else self.recurrent(self.state))
        self.state = new.detach()
        return new


def test_hidden_state_in_an_attribute_is_that_of_training():
    model, other = Hidden(), Hidden()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, reference=inputs())
    assert model.state is None
    for seed in range(15):
        x = torch.randn(16, SIZE, generator=torch.Generator().manual_seed(seed))  # not as many rows as the reference
        step(model, optimizer, x)
        other(x)
        assert torch.equal(model.state, other.state)
    assert moor.measured().nats == 0


def test_hidden_state_that_does_not_fit_the_reference_is_named():
    model = Hidden()
    model(torch.randn(16, SIZE))
    with pytest.raises(MooringError, match=r"keeps a tensor of its last pass in 'state'.*reset it") as error:
        mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=inputs())
    assert one_line(error)


def test_models_in_several_threads_are_observed_each():
    """A pass over the reference of one model hid the training passes of the others: 'EWC saw no outputs'."""
    errors, begin = [], threading.Barrier(4)

    class Slow(nn.Module):
        """A model whose passes over the reference take long, so that others train meanwhile."""

        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            if not self.training:
                threading.Event().wait(0.002)
            return self.net(x)

    def work():
        try:
            model = Slow()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            mooring.attach(model, optimizer, reference=inputs(), memory=mooring.Memory(), progress=False)
            begin.wait()
            for x in inputs(30):
                step(model, optimizer, x)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(SIZE, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.checkpoints:
            return self.last(checkpoint(self.second, hidden, use_reentrant=True))
        return self.last(self.second(hidden))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of passes without gradients
def test_reentrant_checkpoints_are_distilled_as_without():
    models = []
    for checkpoints in (True, False):
        model = Reentrant()
        model.checkpoints = checkpoints
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        moor = mooring.attach(model, optimizer, reference=inputs())
        for x in inputs(10):
            step(model, optimizer, x)
        assert moor.steps == 10
        models.append(model)
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_state_is_resumed_with_the_memory_that_it_was_made_with():
    memory = mooring.Memory(previous="8bit", current="none")
    models = []
    for interrupted in (False, True):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        moor = mooring.attach(model, optimizer, reference=inputs(), memory=memory)
        for number, x in enumerate(inputs()):
            if interrupted and number == 4:
                state = moor.state_dict()
                moor.detach()
                moor = mooring.attach(model, optimizer, memory=memory)
                moor.load_state_dict(state)
            step(model, optimizer, x)
        models.append(model)
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(SIZE, 16), nn.Linear(16, CLASSES)

    def forward(self, x, edges):
        return self.last(edges @ torch.tanh(self.first(x)))


def test_nodes_of_a_graph_stay_together():
    model, nodes = Graph(), 60
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, edges = torch.randn(nodes, SIZE), torch.eye(nodes) + torch.eye(nodes).roll(1, 0)
    labels = torch.arange(nodes) % CLASSES
    moor = mooring.attach(model, optimizer, reference=[({"x": x, "edges": edges}, labels)])
    passes = []
    model.register_forward_pre_hook(lambda model, args, given: passes.append(given["x"].shape), with_kwargs=True)
    for _ in range(10):
        optimizer.zero_grad()
        cross_entropy(model(x=x, edges=edges), labels.roll(1)).backward()
        optimizer.step()
    assert {*passes} == {(nodes, SIZE)}
    assert moor.finish().samples == nodes


def test_model_of_another_dtype_in_mid_training_is_refused_in_one_line():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, reference=inputs())
    step(model, optimizer, inputs()[0])
    model.bfloat16()
    with pytest.raises(MooringError, match=r"does not take the data or reference any more .*before attach") as error:
        step(model, optimizer, inputs()[0].bfloat16())
    assert one_line(error)


@pytest.mark.parametrize("origin", ["with a graph", "in inference mode"])
def test_features_of_another_network_are_a_reference(origin):
    backbone, model = nn.Linear(SIZE, SIZE), mlp()
    with torch.inference_mode(origin == "in inference mode"):
        reference = [backbone(x) for x in inputs()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, reference=reference)
    for x in inputs(10):
        step(model, optimizer, x)
    assert backbone.weight.grad is None


def test_samples_in_the_place_of_batches_are_refused():
    x, y = torch.randn(64, SIZE), torch.arange(64) % CLASSES
    model = mlp()
    with pytest.raises(MooringError, match=r"DataLoader\(list\(zip\(x, y\)\), batch_size=32\)") as error:
        mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=list(zip(x, y, strict=True)))
    assert one_line(error)


def test_attach_in_inference_mode_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.inference_mode(), pytest.raises(MooringError, match=r"inference_mode\(\).*torch.no_grad\(\)") as error:
        mooring.attach(model, optimizer, reference=inputs())
    assert one_line(error)


class WithLengths(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(9, 8), nn.Linear(8, CLASSES)

    def forward(self, ids, lengths=None):
        return self.head(self.embedding(ids))


def test_lengths_of_sequences_are_no_labels_and_padding_does_not_count():
    model, generator = WithLengths(), torch.Generator().manual_seed(0)
    ids, lengths = torch.randint(1, 9, (16, 6), generator=generator), torch.arange(16) % 3 + 1
    present = torch.arange(6) < lengths[:, None]
    ids = ids * present
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=[(ids, lengths)] * 4)
    with torch.no_grad():
        old = model(ids).log_softmax(2)
        model.head.weight.add_(1.0)
        model.embedding.weight.mul_(1.5)
        divergence = (old.exp() * (old - model(ids).log_softmax(2))).sum(2)
    assert moor.measured().nats == pytest.approx(float(divergence[present].mean()), rel=1e-4)


@pytest.mark.parametrize("name", ["attention_mask", "src_key_padding_mask", "float_padding_mask"])
def test_masks_of_any_form_decide_what_counts(name):
    class Masked(WithLengths):
        def forward(self, ids, **masks):
            return super().forward(ids)

    model = Masked()
    ids = torch.randint(9, (8, 6), generator=torch.Generator().manual_seed(0))
    present = torch.arange(6).expand(8, 6) < 4
    masks = {
        "attention_mask": present.long(),
        "src_key_padding_mask": ~present,
        "float_padding_mask": torch.zeros(8, 6).masked_fill(~present, -torch.inf),
    }
    labels = ids.masked_fill(torch.arange(6) < 2, -100)  # the prompt counts, too
    batch = ({"ids": ids, name: masks[name]}, labels.clamp(max=CLASSES - 1))
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=[batch] * 4)
    with torch.no_grad():
        old = model(ids).log_softmax(2)
        model.embedding.weight.mul_(2.0)
        divergence = (old.exp() * (old - model(ids).log_softmax(2))).sum(2)
    assert moor.measured().nats == pytest.approx(float(divergence[present].mean()), rel=1e-4)


class Fused(nn.Module):
    """A language model with a fused loss, which returns no logits where it gets labels."""

    def __init__(self, *, fused):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.fused = nn.Embedding(9, 9), fused

    def forward(self, input_ids, labels=None):
        logits = self.embedding(input_ids)
        if labels is None:
            return {"logits": logits}
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss} if self.fused else {"loss": loss, "logits": logits}


def test_fused_loss_is_measured_and_distilled_as_one_that_returns_logits():
    values = []
    for fused in (True, False):
        model = Fused(fused=fused)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ids = list(torch.randint(9, (8, 16, 6), generator=torch.Generator().manual_seed(0)))
        moor = mooring.attach(model, optimizer, reference=[{"input_ids": part, "labels": part} for part in ids])
        for part in ids:
            optimizer.zero_grad()
            model(part, labels=(part + 1) % 9)["loss"].backward()
            optimizer.step()
        values.append(moor.measured().nats)
    assert values[0] > 0
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_few_samples_are_announced(capsys):
    model = mlp()
    mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=[torch.randn(8, SIZE)])
    assert "the reference has 8 samples" in capsys.readouterr().err
    mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=inputs())
    assert not capsys.readouterr().err


def test_model_that_is_kept_without_an_end_of_its_task_is_named():
    from mooring.integrations.deferred_attach import MooringOwner

    model = mlp()
    owner = MooringOwner(None, {"reference": inputs(), "pull": mooring.Budget(1e-6)}, consolidates=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    moor = owner._attach(model, optimizer)
    owner.warn_if_unfinished("kept")  # nothing is forgotten yet
    for x in inputs(16):
        step(model, optimizer, x)
    with pytest.warns(UnheldWarning, match=r"the model is kept with .* nats forgotten, and 1e-06 are allowed"):
        owner.warn_if_unfinished("kept")
    moor.finish()
    owner.warn_if_unfinished("kept")
