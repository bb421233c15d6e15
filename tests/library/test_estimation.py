"""Tests of importance estimated from reference data: it equals an oracle and does not change the model."""

import functools
import itertools
import math
import random
import warnings
from copy import deepcopy

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import mooring
from library.stateful_net import StatefulNet, model_unchanged
from mooring.errors import MooringError, NonFiniteError
from mooring.reference import reference_labels
from mooring.reference.reference_labels import prepare_labels, warn_of_probabilities
from mooring.rules import Kronecker
from mooring.testing import check_equal

IMPORTANCES = {
    "ewc": lambda: {"importance": "ewc", "pull": mooring.Interpolation()},
    "fisher": lambda: {"importance": mooring.EWC(decay=None, per_sample=True)},
    "sampled": lambda: {"importance": mooring.EWC(labels="sampled")},
    "mas": lambda: {"importance": "mas", "pull": mooring.Interpolation()},
    "balanced": lambda: {"importance": mooring.Balanced("mas"), "pull": mooring.Interpolation()},
    "uniform": lambda: {"importance": "uniform", "pull": mooring.Penalty(0.1)},
    "random": lambda: {"importance": "random"},
    "budget": lambda: {"pull": mooring.Budget(0.05)},
    "kronecker": lambda: {"importance": Kronecker(every=3), "pull": mooring.Budget(0.05)},
}


IMAGES, CLASSES = torch.zeros(2, 1, 6, 6), torch.zeros(2, dtype=torch.long)


def batches(count=5, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 1, 6, 6, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def make_model(lr=0.05):
    torch.manual_seed(1)
    model = StatefulNet()
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["loader", "inputs", "function"])
@pytest.mark.parametrize("name", IMPORTANCES)
def test_estimate_does_not_change_the_model(name, kind):
    model, optimizer = make_model()
    train(model, optimizer, batches(2, seed=5))
    model.drop.eval()

    def drawn(model):
        model.train()  # the function changes modes and random states
        model(torch.randn(8, 1, 6, 6))
        model.eval()
        random.random(), numpy.random.rand()
        return torch.randn(8, 1, 6, 6), torch.randint(3, (8,))

    data = {
        "loader": torch.utils.data.DataLoader([(x[0], y[0]) for x, y in batches(30)], batch_size=8, shuffle=True),
        "inputs": [x for x, _ in batches()],
        "function": drawn,
    }[kind]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    moments = deepcopy(optimizer.state_dict())
    with model_unchanged(model):
        moor = mooring.attach(model, optimizer, reference=data, batches=4, **IMPORTANCES[name]())
    check_equal("anchor", moor.anchor, {key: before[key] for key in moor.anchor})
    assert len(moor.anchor) == len(list(model.parameters()))
    for key, state in optimizer.state_dict()["state"].items():
        check_equal("optimizer", state, moments["state"][key])
    assert (moor.tasks, moor.steps) == (1, 0)


@pytest.mark.parametrize("name", IMPORTANCES)
def test_estimate_equals_training_with_learning_rate_0(name):
    """Training is in eval mode with learning rate 0, and all batches have the same weight."""
    options = IMPORTANCES[name]()
    model, optimizer = make_model()
    moor = mooring.attach(model, optimizer, **options)
    moor.estimate(batches())
    still, frozen = make_model(lr=0.0)
    importance = options.get("importance")
    if isinstance(importance, mooring.Balanced):
        options["importance"] = mooring.Balanced(mooring.MAS(decay=None))
    elif importance in ("ewc", "mas") or name == "sampled":
        inner = {"ewc": mooring.EWC, "mas": mooring.MAS}.get(importance)
        options["importance"] = inner(decay=None) if inner else mooring.EWC(decay=None, labels="sampled")
    elif name == "kronecker":
        options["importance"] = Kronecker(every=1)
    other = mooring.attach(still, frozen, **options)
    train(still.eval(), frozen, batches())
    check_equal("current", moor.current, other.current)
    for m, n in zip(moor._states.records.values(), other._states.records.values(), strict=True):
        assert m.count == n.count == 5
        if m.factors:
            check_equal("factors", m.factors.slots(), n.factors.slots())
            assert m.factors.count == n.factors.count == 5


@pytest.mark.faults  # slow
def test_inputs_without_labels_give_the_fisher_of_the_models_predictions():
    """The mean over many draws equals the sum over all labels weighted by their probability."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4).double()
    with torch.no_grad():
        model.weight.mul_(3)
    x = torch.randn(6, 3, dtype=torch.float64)
    fisher = torch.zeros_like(model.weight)
    for sample in x:
        log = model(sample).log_softmax(-1)
        for label in range(4):
            (score,) = torch.autograd.grad(log[label], model.weight, retain_graph=True)
            fisher += log[label].exp().item() * score.square() / len(x)
    for importance in (mooring.EWC(per_sample=True), mooring.EWC(labels="sampled")):
        with mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), importance=importance) as moor:
            moor.estimate([x] * 4000)
            torch.testing.assert_close(moor.current["weight"], fisher, rtol=0.15, atol=0.005)


def test_labels_are_sampled_per_position_and_other_batches_are_unchanged():
    embedding = nn.Embedding(5, 5)
    tokens = torch.randint(5, (3, 7))
    state = torch.get_rng_state()
    (x, y), (_, again) = (prepare_labels(embedding, given, seed=4) for given in (tokens, [tokens]))
    assert x is tokens
    assert y.shape == (3, 7)
    assert torch.equal(y, again)
    assert torch.equal(torch.get_rng_state(), state)
    for batch in ((tokens, y), {"x": tokens, "labels": y}, "text"):
        assert prepare_labels(embedding, batch, seed=0) is batch


@pytest.mark.parametrize("at_once", [1 << 24, 7 * 11])
def test_labels_of_many_classes_are_drawn_in_parts_from_the_prediction(at_once, monkeypatch):
    monkeypatch.setattr(reference_labels, "MAX_PROBABILITIES", at_once)
    logits = torch.randn(11).repeat(2, 3000, 1)
    _, drawn = prepare_labels(nn.Identity(), logits, seed=5)
    if at_once > logits.numel():  # as torch draws them
        generator = torch.Generator().manual_seed(5)
        expected = torch.multinomial(logits.flatten(0, 1).softmax(-1), 1, generator=generator)
        assert torch.equal(drawn, expected.view(2, 3000))
    frequencies = drawn.flatten().bincount(minlength=11) / drawn.numel()
    torch.testing.assert_close(frequencies, logits[0, 0].softmax(-1), rtol=0, atol=0.03)


def test_reference_consolidate_and_estimate_agree_before_the_first_step():
    states = []
    for how in ("reference", "consolidate", "estimate"):
        model, optimizer = make_model()
        if how == "reference":
            moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1, measured=False), reference=batches())
        else:
            pull = mooring.Budget(0.1, measured=False)
            moor = mooring.attach(model, optimizer, pull=pull, buffers="frozen")
            if how == "estimate":
                moor.estimate(batches())
                moor.consolidate()
            else:
                moor.consolidate(data=batches())
        train(model, optimizer, batches(seed=9))
        states.append({**moor.state_dict(), **model.state_dict()})
    for other in states[1:]:
        check_equal("state", other, states[0])


def test_estimate_replaces_the_importance_from_training():
    model, optimizer = make_model()
    moor = mooring.attach(model, optimizer, importance=mooring.MAS())
    train(model, optimizer, batches(seed=3))
    moor.estimate(batches())
    fresh = StatefulNet()
    fresh.load_state_dict(model.state_dict())
    again = mooring.attach(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1), importance=mooring.MAS())
    again.estimate(batches())
    check_equal("current", moor.current, again.current)
    assert moor.steps == 5
    moor.consolidate()
    assert bool((moor.previous["head.weight"] > 0).all())


def test_second_reference_is_merged_with_the_first():
    model, optimizer = make_model()
    moor = mooring.attach(model, optimizer, pull=mooring.Interpolation(), reference=batches(), merge="sum")
    first = {key: t.clone() for key, t in moor.previous.items()}
    moor.consolidate(data=batches(seed=1))
    alone = mooring.attach(*make_model(), pull=mooring.Interpolation(), reference=batches(seed=1), merge="sum")
    check_equal("sum", moor.previous, {key: first[key] + t for key, t in alone.previous.items()})


def test_backward_pass_before_an_estimate_counts_in_its_step():
    currents = []
    for between in (False, True):
        model, optimizer = make_model()
        moor = mooring.attach(model, optimizer, importance=mooring.MAS(decay=None))
        model.eval()
        x, y = batches()[0]
        nn.functional.cross_entropy(model(x), y).backward()
        if between:
            moor.estimate(batches(1, seed=7))
            for m in moor._states.records.values():
                m.count = 0  # start the mean again
        optimizer.step()
        currents.append(moor.current)
    check_equal("current", *currents)


def test_batches_limits_what_is_read_and_how_often_a_function_is_called():
    def endless():
        for x in itertools.count():
            read.append(x)
            yield batches(1, seed=x)[0]

    read, made_by = [], []
    moor = mooring.attach(*make_model(), reference=endless(), batches=3)
    assert read == [0, 1, 2]

    def make(model):
        assert not torch.is_grad_enabled()
        assert not model.training
        made_by.append(len(made_by))
        return batches(1, seed=made_by[-1])[0]

    other = mooring.attach(*make_model(), reference=make, batches=3)
    assert made_by == read
    check_equal("previous", other.previous, moor.previous)


class Returns(nn.Module):
    """A model that takes keyword arguments and returns its loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"logits": logits, **({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})}


def test_mapping_is_passed_as_keyword_arguments_and_the_models_loss_is_used():
    model = Returns()
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer)
    moor.estimate([{"x": x, "labels": y}])
    first = moor.current["net.weight"].clone()
    moor.estimate([(x, y)])
    torch.testing.assert_close(first, moor.current["net.weight"])
    with pytest.raises(MooringError, match="returned no loss for a batch of x, labels: give a loss"):
        moor.estimate([{"x": x, "labels": None}])


def test_progress_bar_is_shown_on_request_and_cleared(capsys):
    mooring.attach(*make_model(), reference=batches(count=7))
    assert capsys.readouterr() == ("", "")
    mooring.attach(*make_model(), pull=mooring.Budget(0.1, measured=False), reference=batches(), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "estimating importance [" in err
    assert "4/5" in err
    assert err.split("\r")[-1] == ""
    assert err.split("\r")[-2].strip() == ""


@pytest.mark.parametrize(
    ("options", "error", "line"),
    [
        ({"importance": "si"}, MooringError, "SI needs the steps of an optimizer .* use EWC"),
        ({"importance": "rwalk"}, MooringError, "RWalk needs the steps of an optimizer"),
        ({"importance": mooring.Balanced("si")}, MooringError, "Balanced.SI. needs the steps"),
        ({"reference": []}, MooringError, "data has no batches"),
        ({"reference": 3}, MooringError, "data of type int is not"),
        ({"reference": "outputs"}, MooringError, "data of type str is not"),
        ({"reference": torch.zeros(3)}, MooringError, r"data of type Tensor is not.*: split it, as in x.split\(32\)"),
        ({"reference": TensorDataset(torch.zeros(3))}, MooringError, r"TensorDataset is not.*: give DataLoader\(data"),
        ({"reference": ["text"]}, MooringError, r"a batch of type str is not \(inputs, labels\): give tensors"),
        ({"reference": [[torch.zeros(2)] * 3]}, MooringError, r"3 parts \(Tensor, Tensor, Tensor\) is not.*: name sev"),
        ({"reference": [([IMAGES] * 2, CLASSES)]}, MooringError, r"2 parts \(list, Tensor\) is not.*: name several"),
        (
            {"reference": [(IMAGES, torch.rand(2, 4))]},
            MooringError,
            r"labels of shape \(2, 4\) and torch.float32 are not",
        ),
        ({"reference": [{"x": IMAGES, "y": CLASSES}]}, MooringError, "'y'.*: give inputs alone.*keyword arguments"),
        ({"reference": [IMAGES.double()]}, MooringError, "does not fit the model.*in the model's dtype"),
        ({"reference": {"x": torch.zeros(2, 3)}}, MooringError, "data of type dict is not a collection of batches"),
        ({"reference": lambda: torch.zeros(2, 3)}, MooringError, "a function that does not take the model alone"),
        ({"reference": [{"input_ids": [1, 2], "labels": [1, 2]}]}, MooringError, "rows with input_ids, labels, not"),
        ({"batches": 0}, MooringError, "batches=0 is not allowed"),
        ({"reference": lambda model: None, "batches": None}, MooringError, "give batches="),
        ({"loss": nn.MSELoss()}, MooringError, "the loss failed on batch 0.*called with the model and a batch"),
        ({"loss": nn.functional.cross_entropy}, MooringError, "the loss failed on batch 0.*with the model and a batch"),
        ({"loss": lambda model, batch: 1.0}, MooringError, "returned type float"),
        ({"loss": lambda model, batch: model(batch[0])}, MooringError, "returned shape"),
        (
            {"loss": lambda model, batch: model(batch[0]).sum() * torch.nan},
            NonFiniteError,
            "loss on batch . of the data or reference is not",
        ),
        ({"loss": lambda model, batch: torch.ones(())}, MooringError, "no moored parameter"),
        ({"loss": lambda model, batch: torch.ones((), requires_grad=True)}, MooringError, "no moored parameter"),
        ({"reference": None, "loss": lambda model, batch: 1.0}, MooringError, "loss has no effect without"),
    ],
)
def test_bad_references_are_refused_in_one_line_and_change_nothing(options, error, line):
    model, optimizer = make_model()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(error, match=line) as error:
        mooring.attach(model, optimizer, **{"reference": batches(), **options})
    assert "\n" not in str(error.value)
    check_equal("model", model.state_dict(), before)
    assert model.training
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_hooks for module in model.modules())
    mooring.attach(model, optimizer, reference=batches())


def test_frozen_model_is_refused_and_says_what_to_unfreeze():
    model, optimizer = make_model()
    model.requires_grad_(False)
    with pytest.raises(MooringError, match=r"^every parameter .* is frozen or excluded, .*: call requires_grad_\(\)"):
        mooring.attach(model, optimizer, reference=batches())


@pytest.mark.parametrize("labelled", [True, False])
def test_probabilities_in_place_of_logits_warn_once(labelled):
    data = [(x, torch.zeros(4, dtype=torch.long)) if labelled else x for x in torch.randn(3, 4, 2)]
    model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(1))
    with pytest.warns(UserWarning, match="returns probabilities, .*: return logits, or give outputs=") as caught:
        mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=data)
    assert len(caught) == 1
    outputs = {"outputs": lambda p: p.clamp_min(1e-9).log()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), reference=data, **outputs)
        mooring.attach(model[0], torch.optim.SGD(model.parameters(), lr=0.1), reference=data)


def test_probabilities_warn_where_data_is_only_measured():
    model = nn.Sequential(nn.Linear(2, 3), nn.Softmax(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    model(torch.randn(4, 2)).square().sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="returns probabilities, ") as caught:
        moor.consolidate(data=list(torch.randn(3, 4, 2)))
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("shape", "dimension", "warned"),
    [((2, 3, 4, 4), 1, True), ((2, 4, 3), 2, True), ((0, 3), 1, False), ((0, 4, 3), 2, False), ((2, 0, 3), 2, False)],
)
def test_probabilities_are_found_along_the_dimension_of_classes(shape, dimension, warned, recwarn):
    warn_of_probabilities(torch.randn(shape).softmax(dimension))
    assert bool(recwarn) == warned


def test_reference_may_be_a_decorated_function_of_the_model():
    def two(model, count):
        return torch.zeros(count, 1, 6, 6)

    @functools.wraps(two)
    def generate(model):
        return two(model, 2)

    model, optimizer = make_model()
    moor = mooring.attach(model, optimizer, reference=generate, batches=2)
    assert moor.tasks == 1


def test_outputs_without_classes_are_refused():
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
    moor = mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), importance="mas")
    with pytest.raises(MooringError, match=r"cannot draw labels from outputs of shape \(4,\)"):
        moor.estimate([torch.randn(4, 3)])
    moor.estimate([torch.randn(4, 3)], loss=lambda model, x: model(x).sum())
    assert bool((moor.current["0.weight"] > 0).all())


class Rebinding(nn.Module):
    """A model whose forward pass binds buffers and counters anew, and renormalizes an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3, max_norm=0.5), nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("unset", None)
        self.calls, self.cached = 0, torch.zeros(2)

    def forward(self, ids):
        hidden = self.embedding(ids)
        self.mean, self.unset = 0.9 * self.mean + 0.1 * hidden.detach().mean(0), hidden.detach().clone()
        self.register_buffer("added", hidden.detach().clone())
        self.calls, self.cached = self.calls + 1, self.cached.add_(1)
        return self.head(hidden + self.mean)


@pytest.mark.parametrize("options", [{}, {"pull": mooring.Budget(0.1)}], ids=["estimate", "consolidate"])
def test_model_that_binds_buffers_anew_and_renormalizes_weights_is_unchanged(options):
    torch.manual_seed(0)
    model = Rebinding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, mean = deepcopy(model.state_dict()), model.mean
    reference = [torch.arange(5), torch.arange(4)]
    moor = mooring.attach(model, optimizer, **options)
    moor.estimate(reference)
    check_equal("anchors", moor.anchor, {name: before[name] for name in moor.anchor})
    if options:
        moor.consolidate(data=reference)
    check_equal("state", model.state_dict(), before)
    assert model.mean is mean
    assert model.unset is None
    assert model.calls == 0
    assert not model.cached.any()


class Remembering(nn.Module):
    """A model that keeps hidden states between its calls."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.hidden, self.states, self.history, self.cache = None, (), [], {}

    def forward(self, x):
        self.hidden = x.detach()
        self.states = (self.hidden, *self.states)
        self.history.append(x.detach())
        self.cache[len(x)] = x.detach()
        return self.head(x)


def test_model_that_keeps_hidden_states_is_unchanged():
    model = Remembering()
    history, cache = model.history, model.cache
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mooring.attach(model, optimizer, reference=[torch.randn(4, 3) for _ in range(2)])
    assert model.hidden is None
    assert model.states == ()
    assert model.history is history == []
    assert model.cache is cache == {}


def test_reference_of_a_model_without_weights_is_refused_in_one_line():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MooringError, match=r"'0.weight' is on the meta device and has no values: load .* first$"):
        mooring.attach(model, optimizer, reference=[torch.randn(4, 3)])


def test_gradients_of_a_network_outside_the_model_are_unchanged():
    generator, discriminator = nn.Linear(3, 4), nn.Linear(4, 2)
    discriminator(torch.ones(1, 4)).sum().backward()
    before = [p.grad.clone() for p in discriminator.parameters()]

    def loss(model, noise):
        return nn.functional.cross_entropy(discriminator(model(noise)), noise.argmax(1) % 2)

    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    mooring.attach(generator, optimizer, reference=[torch.randn(8, 3)], loss=loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(discriminator.parameters(), before, strict=True))


def test_state_saved_after_an_estimate_resumes_without_the_data():
    model, optimizer = make_model()
    moor = mooring.attach(model, optimizer, importance=Kronecker(), pull=mooring.Budget(0.05), reference=batches())
    resumed, resumed_optimizer = make_model()
    resumed_moor = mooring.attach(resumed, resumed_optimizer, importance=Kronecker(), pull=mooring.Budget(0.05))
    resumed_moor.load_state_dict(deepcopy(moor.state_dict()))
    for net, opt in ((model, optimizer), (resumed, resumed_optimizer)):
        torch.manual_seed(2)
        train(net, opt, batches(seed=9))
    check_equal("model", resumed.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("batch", "reason", "remedy"),
    [
        (torch.ones(8, 9), "(?:addmm: )?mat1 and mat2 shapes cannot be multiplied", "give batches"),
        ((torch.ones(8, 3), torch.full((8,), 7)), "Target 7 is out of bounds", "the model must have.*keep the old one"),
        (
            (torch.ones(8, 3), torch.full((8,), -1)),
            "Target -1 is out of bounds",
            "the model must have.*-100 is ignored",
        ),
        ((torch.ones(8, 3), torch.zeros(5, dtype=torch.long)), "Expected input batch_size", "give batches"),
    ],
)
def test_batch_that_does_not_fit_the_model_is_named_and_nothing_changes(batch, reason, remedy):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        MooringError, match=rf"^batch 1 of the data or reference does not fit the model \({reason}.*: {remedy}"
    ):
        mooring.attach(model, optimizer, reference=[torch.ones(8, 3), batch])
    mooring.attach(model, optimizer)  # the first attempt left nothing


@pytest.mark.parametrize("number", [0, 2, 5, 6])
def test_batch_of_a_divided_reference_has_the_number_that_the_user_gave_it(number):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = [torch.ones(8, 9 if index == number else 3) for index in range(8)]  # 0, 3 and 6 are held out
    with pytest.raises(MooringError, match=rf"^batch {number} of the data or reference does not fit the model"):
        mooring.attach(model, optimizer, reference=reference)
    mooring.attach(model, optimizer)  # the first attempt left nothing


@pytest.mark.parametrize("number", [3, 4])
def test_batch_whose_loss_is_not_finite_is_named(number):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = [torch.full((8, 3), math.nan if index == number else 1.0) for index in range(8)]  # 3 is held out
    with pytest.raises(NonFiniteError, match=rf"on batch {number} of the data or reference .* leave the batch out"):
        mooring.attach(model, optimizer, reference=reference)


def test_samples_that_are_not_stacked_into_batches_are_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MooringError, match=r"single samples, not batches: stack single samples into batches"):
        mooring.attach(model, optimizer, reference=list(torch.randn(20, 3)))


def test_model_without_forward_is_named():
    model = nn.Module()
    model.net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MooringError, match=r"^the model cannot be called on batch 0 .*MooringCallback\(module="):
        mooring.attach(model, optimizer, reference=[torch.ones(8, 3)] * 8)


def test_own_outputs_as_targets_are_refused_with_a_remedy_that_works():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = [(x, model(x).detach()) for x in torch.randn(8, 16, 3)]
    options = {"reference": reference, "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])}
    with pytest.raises(MooringError, match=r'^every importance on data is 0.*own outputs.*importance="mas"'):
        mooring.attach(model, optimizer, **options)
    moor = mooring.attach(model, optimizer, importance="mas", pull=mooring.Budget(0.01), **options)
    for x in torch.randn(50, 16, 3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), torch.ones(16, 2)).backward()
        optimizer.step()
    moor.finish()
    rise = torch.stack([nn.functional.mse_loss(model(x), target) for x, target in reference]).mean()
    assert 0 < rise < 0.02


def test_anchor_of_a_wider_dtype_is_computed_with_after_a_reference():
    model = nn.Linear(6, 4)
    memory = mooring.Memory(anchor=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, memory=memory, reference=[torch.randn(8, 6)] * 2)
    for state in moor._states.records.values():
        assert state.anchor.dtype == state.compute_dtype == torch.float64
        assert state.anchor.data_ptr() != state.parameter.data_ptr()


@pytest.mark.parametrize("pull", [mooring.Interpolation(), mooring.Budget(0.1, measured=False)], ids=repr)
def test_data_of_a_task_whose_importance_is_known_is_refused_and_changes_nothing(pull):
    model, optimizer = make_model()
    moor = mooring.attach(model, optimizer, pull=pull)
    train(model, optimizer, batches())
    before = {key: tensor.clone() for key, tensor in moor.state_dict().items()}
    with pytest.raises(MooringError, match="data has no effect, because this task has an importance") as error:
        moor.consolidate(data=batches())
    assert "\n" not in str(error.value)
    check_equal("state", moor.state_dict(), before)
    moor.estimate(batches())
    moor.consolidate()
    assert moor.tasks == 1
