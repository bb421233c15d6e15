"""Tests that bad options are refused in one line that names them, before anything changes."""

import pytest
import torch
from torch import nn

import mooring
from mooring.errors import MooringError, UnheldWarning


def model():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def attach(net=None, optimizer=None, **options):
    net = net or model()
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    return mooring.attach(net, optimizer, **options)


def refuse(message, call):
    with pytest.raises(MooringError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"importance": "ewk"}, "unknown importance 'ewk' \\(did you mean 'ewc'\\?\\); allowed: ewc, mas"),
        ({"importance": 3}, "importance=3 is not an importance"),
        ({"importance": mooring.EWC}, "is not an importance"),
        ({"pull": "penalty"}, "is not a pull: give an instance"),
        ({"pull": mooring.Interpolation}, "is not a pull: give an instance"),
        ({"buffers": "freez"}, "unknown buffers 'freez'.*allowed: follow, frozen"),
        ({"merge": "mean"}, "unknown merge 'mean'.*allowed: average, sum, max"),
        ({"exclude": "hed.*"}, "'hed.\\*' matches no parameter"),
        ({"exclude": ["0.wieght"]}, "'0.wieght' matches no parameter"),
        ({"exclude": [nn.Linear(1, 1)]}, "Linear is not a module of this model"),
        ({"exclude": [3]}, "3 is not a name"),
        ({"exclude": "*"}, "every parameter of the optimizer is excluded"),
    ],
)
def test_attach_refuses_bad_options(options, message):
    refuse(message, lambda: attach(**options))


def test_attach_refuses_a_foreign_optimizer():
    refuse(
        "holds none of the model's parameters", lambda: attach(optimizer=torch.optim.SGD(model().parameters(), lr=0.1))
    )


def test_attach_refuses_lbfgs():
    net = model()
    refuse("LBFGS cannot be moored", lambda: attach(net, torch.optim.LBFGS(net.parameters())))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_attach_refuses_layers_without_a_shape():
    net = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    refuse("'0.weight' has no shape yet", lambda: attach(net, torch.optim.SGD(net.parameters(), lr=0.1)))


def test_attach_refuses_the_same_optimizer_twice_until_detached():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    moor = mooring.attach(net, optimizer)
    refuse("already has a Mooring", lambda: mooring.attach(net, optimizer))
    moor.detach()
    mooring.attach(net, optimizer)


def test_attach_refuses_complex_parameters_unless_excluded():
    net = model()
    net.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    refuse("'phase' is complex", lambda: attach(net))
    attach(net, exclude="phase")


def test_sparse_gradients_are_refused():
    net = nn.Embedding(4, 2, sparse=True)
    refuse("sparse gradients", lambda: attach(net))

    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(4, 2))

        def forward(self, index):
            return nn.functional.embedding(index, self.table, sparse=True)

    hidden = Hidden()
    optimizer = torch.optim.SGD(hidden.parameters(), lr=0.1)
    mooring.attach(hidden, optimizer)
    hidden(torch.tensor([1])).sum().backward()
    refuse("'table' has a sparse gradient", optimizer.step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mooring.EWC(decay=1.0), "decay=1.0"),
        (lambda: mooring.EWC(decay=-0.1), "decay=-0.1"),
        (lambda: mooring.EWC(labels="true"), "unknown labels 'true'"),
        (lambda: mooring.EWC(batch_size=0), "batch_size=0"),
        (lambda: mooring.MAS(decay=2), "decay=2"),
        (lambda: mooring.SI(damping=0), "damping=0"),
        (lambda: mooring.SI(sign="positive"), "unknown sign 'positive'"),
        (lambda: mooring.SI(sign=1.5), "sign=1.5"),
        (lambda: mooring.RWalk(damping=-1), "damping=-1"),
        (lambda: mooring.RWalk(decay=1), "decay=1"),
        (lambda: mooring.Balanced("ewk"), "unknown importance 'ewk'"),
        (lambda: mooring.Penalty(-1), "strength=-1"),
        (lambda: mooring.Penalty(float("nan")), "strength=nan"),
        (lambda: mooring.Penalty(torch.tensor([1.0, -1.0])), "strength="),
        (lambda: mooring.Proximal(-1), "strength=-1"),
        (lambda: mooring.Interpolation(stiffness=1.5), "stiffness=1.5"),
        (lambda: mooring.Interpolation(every=0), "every=0"),
        (lambda: mooring.Interpolation(every=1.5), "every=1.5"),
        (lambda: mooring.Interpolation(root=0), "root=0"),
    ],
)
def test_options_outside_their_range_are_refused(make, message):
    refuse(message, make)


def test_exclude_takes_names_patterns_and_modules():
    for exclude in ("1", "1.*", ["1.weight", "1.bias"], None):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        moor = mooring.attach(net, optimizer, exclude=net[1] if exclude is None else exclude)
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert sorted(moor.anchor) == ["0.bias", "0.weight"]


def test_heads_can_be_excluded_before_they_exist():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = nn.Linear(2, 2), nn.ModuleList()

    net = Heads()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    moor = mooring.attach(net, optimizer, exclude="heads.*")
    net.heads.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": net.heads.parameters()})
    net.heads[0](net.body(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    assert sorted(moor.anchor) == ["body.bias", "body.weight"]


def test_importance_with_a_reserved_state_name_is_refused():
    class Greedy(mooring.rules.Importance):
        def start(self, like, *, name, task):
            return {"current": torch.zeros_like(like), "theta": like}

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mooring.attach(net, optimizer, importance=Greedy())
    net(torch.ones(1, 3)).sum().backward()
    refuse("Greedy.start must return 'current'", optimizer.step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mooring.Penalty("100"), "strength='100' is not allowed"),
        (lambda: mooring.Penalty(float("inf")), "strength=inf is not allowed"),
        (lambda: mooring.EWC(decay="x"), "decay='x' is not allowed"),
        (lambda: mooring.EWC(batch_size=2.5, per_sample=True), "batch_size=2.5 is not allowed"),
        (lambda: mooring.EWC(batch_size=64), "batch_size has no effect here"),
        (lambda: mooring.SI(sign=None), "sign=None is not allowed"),
        (lambda: mooring.Interpolation(stiffness=None), "stiffness=None is not allowed"),
        (lambda: mooring.Interpolation(every=True), "every=True is not allowed"),
        (lambda: attach(exclude=None), "exclude=None is not allowed"),
        (lambda: attach(merge=[1]), "unknown merge"),
        (lambda: attach(pull=mooring.Penalty(torch.tensor([1.0, 2.0]))), "has a value per run"),
        (lambda: mooring.attach(None, None), "expected Module, got NoneType"),
        (lambda: mooring.attach(model(), model()), "expected Optimizer, got Sequential"),
    ],
)
def test_wrong_types_are_refused_in_one_line(make, message):
    refuse(message, make)


def test_tied_parameter_is_excluded_by_any_of_its_names():
    for exclude in ("head", "head.weight", "embed", None):
        net = nn.ModuleDict({"body": nn.Linear(2, 2), "embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3)})
        net["head"].weight = net["embed"].weight
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.warns(UnheldWarning, match=r"exclude frees '(embed|head).weight' too, because it is tied to"):
            moor = mooring.attach(net, optimizer, exclude=net["head"] if exclude is None else exclude)
        net["head"](net["body"](net["embed"](torch.tensor([1])))).sum().backward()
        optimizer.step()
        assert not {"embed.weight", "head.weight"} & moor.anchor.keys()


def test_replacement_of_an_excluded_head_is_excluded():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    moor = mooring.attach(net, optimizer, exclude=net[1])
    net[1] = nn.Linear(2, 5)
    optimizer.add_param_group({"params": net[1].parameters()})
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    moor.consolidate()
    assert sorted(moor.anchor) == ["0.bias", "0.weight"]


def test_failed_merge_leaves_the_state_unchanged():
    calls = []

    def merge(previous, current):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no")
        return previous + current

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    moor = mooring.attach(net, optimizer, merge=merge)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    before = {k: v.clone() for k, v in moor.state_dict().items()}
    with pytest.raises(RuntimeError, match="no"):
        moor.consolidate()
    after = moor.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
