"""Tests of the promise that every moored parameter that can move is held, or named in a warning and by coverage()."""

import json
import re
import warnings
from copy import deepcopy

import pytest
import torch
from torch import nn

import mooring
from mooring.errors import UnheldWarning
from mooring.rules import Kronecker


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
        optimizer.step()


def once_moored(model: nn.Module | None = None, **options) -> tuple[nn.Module, torch.optim.Optimizer, mooring.Mooring]:
    """Return a model, its optimizer and its Mooring after a first task."""
    model = small() if model is None else model
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, **options)
    train(model, optimizer)
    moor.consolidate()
    return model, optimizer, moor


def statuses(moor: mooring.Mooring) -> dict[str, str]:
    return {entry.name: entry.status for entry in moor.coverage().parameters}


def entry(moor: mooring.Mooring, name: str):
    return next(entry for entry in moor.coverage().parameters if entry.name == name)


KNOWN = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(2)]

# Coverage


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance": "si", "pull": mooring.Penalty(1.0)},
        {"importance": "uniform", "pull": mooring.Proximal(1.0)},
        {"memory": mooring.Memory(previous="8bit")},
        {"importance": Kronecker(), "pull": mooring.Budget(0.1)},
    ],
)
def test_every_parameter_is_held_after_a_task_and_training_does_not_warn(options):
    model, optimizer, moor = once_moored(**options)
    coverage = moor.coverage()
    assert {entry.status for entry in coverage.parameters} == {"held"}
    how = "factors" if isinstance(options.get("importance"), Kronecker) else "scores"
    assert {entry.how for entry in coverage.parameters} == {how}
    assert coverage.summary == "4 of 4 parameters held (67 of 67 weights)" == str(coverage)
    train(model, optimizer)


def test_nothing_is_held_in_a_first_task_and_no_warning_is_given():
    model = small()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer)
    train(model, optimizer)
    assert {*statuses(moor).values()} == {"unheld"}
    assert "give a reference=..." in entry(moor, "0.weight").remedy
    assert str(moor.coverage()).startswith("nothing held yet: first task")
    assert "nothing held yet: first task" in repr(moor)
    moor.consolidate()
    assert "nothing held" not in repr(moor)


def test_reference_holds_every_parameter_before_the_first_step():
    model = small()
    moor = mooring.attach(model, sgd(model), reference=KNOWN)
    assert {*statuses(moor).values()} == {"held"}
    assert "nothing held" not in repr(moor)


def test_excluded_frozen_and_foreign_parameters_are_not_unheld():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[1].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[1].parameters(), *model[2].parameters()], lr=0.1)
    moor = mooring.attach(model, optimizer, exclude="2")
    train(model, optimizer)
    moor.consolidate()
    actual = statuses(moor)
    expected = {"0": "held", "1": "cannot move", "2": "free by request", "3": "cannot move"}
    assert actual == {f"{layer}.{name}": status for layer, status in expected.items() for name in ("weight", "bias")}
    assert entry(moor, "3.weight").reason == "is not in the optimizer"
    train(model, optimizer)


def test_pull_of_strength_0_is_free_by_request():
    for pull in (mooring.Penalty(0.0), mooring.Interpolation(stiffness=0.0)):
        model, optimizer, moor = once_moored(pull=pull)
        assert {*statuses(moor).values()} == {"free by request"}
        train(model, optimizer)


def test_coverage_as_a_dictionary_contains_the_table_and_is_json():
    _, _, moor = once_moored(exclude="2")
    table = json.loads(json.dumps(moor.coverage().to_dict()))
    assert table["tasks"] == 1
    assert [row["status"] for row in table["parameters"]] == ["held"] * 2 + ["free by request"] * 2
    assert table["summary"] == moor.coverage().summary


# Training with unheld parameters


def warned_once(model, optimizer, pattern: str) -> None:
    """Check that training warns once, in one line that matches."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, steps=3)
    (warning,) = caught
    assert issubclass(warning.category, UnheldWarning)
    assert warning.filename == __file__
    message = str(warning.message)
    assert "\n" not in message
    assert "moor.coverage()" in message
    assert pattern in message


def appears(model, optimizer):
    model.append(nn.Linear(3, 3))
    optimizer.add_param_group({"params": [*model[-1].parameters()]})


def is_replaced(model, optimizer):
    model[2] = nn.Linear(8, 3)
    optimizer.add_param_group({"params": [*model[2].parameters()]})


def is_unfrozen(model, optimizer):
    model[0].requires_grad_(requires_grad=True)


CHANGES = {
    "appears": (appears, "'3.weight' and 1 other appeared after the last task was consolidated"),
    "is replaced": (is_replaced, "'2.weight' and 1 other replaced a parameter of the same name"),
    "is unfrozen": (is_unfrozen, "'0.weight' and 1 other did not train before the last task was consolidated"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_parameter_that_changes_after_a_task_is_unheld_and_named_once(change):
    make, pattern = CHANGES[change]
    model = small()
    if change == "is unfrozen":
        model[0].requires_grad_(requires_grad=False)
    model, optimizer, moor = once_moored(model)
    make(model, optimizer)
    unheld = [entry.name for entry in moor.coverage().unheld]
    assert unheld == [f"{pattern[1]}.weight", f"{pattern[1]}.bias"]
    warned_once(model, optimizer, pattern)
    assert [entry.name for entry in moor.coverage().unheld] == unheld
    moor.consolidate()
    assert not moor.coverage().unheld
    train(model, optimizer)


def test_parameter_without_importance_is_unheld_and_named():
    class Ignores(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.ignored, self.factor = nn.Linear(4, 3), nn.Linear(4, 3, bias=False), 0.0

        def forward(self, x):
            return self.used(x) + self.factor * self.ignored(x)

    model, optimizer, moor = once_moored(Ignores())
    assert entry(moor, "ignored.weight").reason == "got an importance of 0 everywhere"
    model.factor = 1.0
    warned_once(model, optimizer, "'ignored.weight' got an importance of 0 everywhere")


def test_parameter_without_a_gradient_in_the_first_task_is_named_when_it_gets_one():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.head = nn.ModuleList(nn.Linear(4, 3) for _ in range(3)), 0

        def forward(self, x):
            return self.heads[self.head](x)

    model, optimizer, moor = once_moored(TwoHeads())
    assert entry(moor, "heads.1.weight").reason == "had no gradient in a past task"
    train(model, optimizer)  # the held head alone
    model.head = 1
    warned_once(model, optimizer, "'heads.1.weight' and 3 others had no gradient in a past task")
    model.head = 2  # already named
    train(model, optimizer)


def test_parameter_frozen_during_the_reference_is_unheld():
    model = small()
    model[0].requires_grad_(requires_grad=False)
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, reference=KNOWN)
    model[0].requires_grad_(requires_grad=True)
    assert "before the reference" in entry(moor, "0.weight").remedy
    warned_once(model, optimizer, "'0.weight' and 1 other did not train when importance was estimated")


def test_parameter_that_another_optimizer_trains_is_named_at_consolidation():
    model = small()
    moored, other = sgd(model[0]), sgd(model[2])
    moor = mooring.attach(model, moored)
    for _ in range(2):
        train(model, moored, 1)
        train(model, other, 1)
    with pytest.warns(UnheldWarning, match=r"'2.bias' and 1 other moved by another optimizer.*attach a Mooring"):
        moor.consolidate()
    assert [entry.name for entry in moor.coverage().unheld] == ["2.weight", "2.bias"]
    train(model, moored)
    train(model, other)
    moor.consolidate()  # warned of already


def test_finish_names_a_parameter_that_another_optimizer_trains():
    model = small()
    moored, other = sgd(model[0]), sgd(model[2])
    moor = mooring.attach(model, moored, reference=KNOWN)
    train(model, moored, 1)
    train(model, other, 1)
    with pytest.warns(UnheldWarning, match=r"'2.bias' and 1 other moved by another optimizer.*attach a Mooring"):
        moor.finish()
    moor.finish()  # warned of already


def test_two_moorings_cover_each_other():
    model = small()
    optimizers = sgd(model[0]), sgd(model[2])
    moors = [mooring.attach(model, optimizer) for optimizer in optimizers]
    for _ in range(2):
        for optimizer in optimizers:
            train(model, optimizer)
        for moor in moors:
            moor.consolidate()
    assert [e.reason for e in moors[0].coverage().of("cannot move")] == ["has another Mooring"] * 2
    assert not moors[0].coverage().unheld


def test_two_budgets_on_one_model_say_that_they_add_up():
    model = small()
    first = mooring.attach(model, sgd(model[0]), pull=mooring.Budget(0.1))
    with pytest.warns(UnheldWarning, match=r"2 Moorings of this model have a budget each.*0.3 nats"):
        second = mooring.attach(model, sgd(model[2]), pull=mooring.Budget(0.2))
    for moor in (first, second):
        moor.detach()
    mooring.attach(model, sgd(model), pull=mooring.Budget(0.1))


def test_a_budget_whose_optimizer_is_gone_does_not_count():
    model = small()
    for _ in range(2):
        mooring.attach(model, sgd(model), pull=mooring.Budget(0.1))


# Tasks without a step


class ByParts(torch.optim.Optimizer):
    """An optimizer as SAM is written: users call first_step and second_step, and step is never called."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def second_step(self):
        self.base_optimizer.step()


@pytest.mark.parametrize("how", ["nothing", "another optimizer", "parts"])
def test_first_consolidation_without_a_step_warns_and_counts_no_task(how):
    model = small()
    optimizer = ByParts(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, buffers="frozen")
    if how == "another optimizer":
        train(model, sgd(model))
    if how == "parts":
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.second_step()
    with pytest.warns(
        UnheldWarning, match=r"saw no step of this optimizer.*no task is counted.*base_optimizer.*rebind"
    ):
        moor.consolidate()
    assert moor.tasks == 0
    assert "nothing held yet" in repr(moor)


class HiddenFirst(nn.Sequential):
    """A classifier that returns its hidden layer before its logits."""

    def forward(self, x):
        hidden = self[1](self[0](x))
        return hidden, self[2](hidden)


def test_head_whose_logits_are_not_the_first_output_is_named_with_its_remedy():
    model = HiddenFirst(*small())
    optimizer = sgd(model)
    with mooring.attach(model, optimizer, reference=KNOWN) as moor:
        assert {entry.name for entry in moor.coverage().unheld} == {"2.weight", "2.bias"}
        assert "give attach outputs=" in moor.coverage().summary
    moor = mooring.attach(model, optimizer, reference=KNOWN, outputs=lambda returned: returned[1])
    assert not moor.coverage().unheld


@pytest.mark.parametrize("steps", [0, 5])
def test_parameters_that_were_replaced_under_the_optimizer_are_warned_of(steps):
    model = small()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, reference=KNOWN)
    train(model, optimizer, steps)
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    train(model, optimizer, 5)
    with pytest.warns(UnheldWarning, match=r"holds none of the model's parameters any more.*assign=True.*rebind"):
        moor.finish()
    moor.rebind(optimizer := sgd(model))
    train(model, optimizer, 5)
    moor.finish()


@pytest.mark.parametrize("end", ["finish", "consolidate", "rebind"])
@pytest.mark.parametrize("how", ["another optimizer", "detached"])
def test_training_that_goes_on_unseen_in_the_middle_of_a_task_is_warned_of(how, end):
    model = small()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, reference=KNOWN, memory=mooring.Memory())
    train(model, optimizer, 5)
    if how == "detached":
        moor.detach()
    train(model, optimizer if how == "detached" else sgd(model), 20)
    with pytest.warns(
        UnheldWarning, match=r"'0.weight' was written to \d+ times after the last step.*rebind"
    ) as caught:
        moor.rebind(sgd(model)) if end == "rebind" else getattr(moor, end)()
    assert len(caught) == 1
    if end != "consolidate":
        moor.finish()


def test_clamped_averaged_and_finished_weights_are_no_unseen_training():
    model = small()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, reference=KNOWN, memory=mooring.Memory())
    for _ in range(20):
        train(model, optimizer, 1)
        with torch.no_grad():
            for _ in range(3):
                model[0].weight.clamp_(-1, 1)
    with moor.finished():
        pass
    model.load_state_dict(model.state_dict())
    moor.finish()
    moor.finish()
    moor.rebind(sgd(model))
    moor.consolidate()


@pytest.mark.parametrize("how", ["another optimizer", "detached"])
def test_finish_warns_once_of_training_that_the_mooring_did_not_see(how):
    model = small()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, reference=KNOWN)
    if how == "detached":
        moor.detach()
    else:
        optimizer = sgd(model)
    train(model, optimizer, 20)
    with pytest.warns(UnheldWarning, match=r"'0.weight' and 3 others moved.*saw no step.*rebind\(optimizer\)"):
        moor.finish()
    moor.finish()  # warned of already


def test_finish_does_not_warn_of_a_rebound_optimizer_or_before_training():
    model = small()
    moor = mooring.attach(model, sgd(model), reference=KNOWN)
    moor.finish()
    optimizer = sgd(model)
    moor.rebind(optimizer)
    train(model, optimizer, 20)
    moor.finish()


def test_first_consolidation_without_a_step_counts_for_scores_that_need_none():
    model = small()
    moor = mooring.attach(model, sgd(model), importance="uniform", pull=mooring.Penalty(1.0))
    moor.consolidate()
    assert moor.tasks == 1
    assert not moor.coverage().unheld


def test_base_optimizer_of_an_optimizer_by_parts_is_moored():
    model = small()
    optimizer = ByParts(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer.base_optimizer)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.second_step()
    moor.consolidate()
    assert len(moor.coverage().held) == 4


# Weights that are replaced


@pytest.mark.parametrize("start", ["reference", "task"])
def test_weights_loaded_after_the_reference_or_task_warn_at_the_first_step(start):
    if start == "task":
        model, optimizer, moor = once_moored()
    else:
        model = small()
        optimizer = sgd(model)
        moor = mooring.attach(model, optimizer, reference=KNOWN)
    other = {key: tensor + 1.0 for key, tensor in model.state_dict().items()}
    model.load_state_dict(other)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer)
    first, *others = (str(warning.message) for warning in caught)
    assert re.search(r"'0.weight' and 3 others changed between the last task.*before attach\(reference", first)
    assert ["so forgetting is only estimated" in other for other in others] == [True] * (start == "reference")
    assert moor.steps == 2


def test_consolidating_again_accepts_the_loaded_weights():
    model, optimizer, moor = once_moored()
    model.load_state_dict({key: tensor + 1.0 for key, tensor in model.state_dict().items()})
    with pytest.warns(UserWarning, match="moved since the last task"):
        moor.consolidate()
    train(model, optimizer)


def test_resuming_in_the_middle_of_a_task_does_not_warn():
    model, optimizer, moor = once_moored(pull=mooring.Penalty(0.1))
    train(model, optimizer, steps=20)
    state, weights = deepcopy(moor.state_dict()), deepcopy(model.state_dict())
    assert max(moor.drift().values()) > 0.05
    resumed = small()
    resumed_optimizer = sgd(resumed)
    resumed_moor = mooring.attach(resumed, resumed_optimizer, pull=mooring.Penalty(0.1))
    resumed.load_state_dict(weights)
    resumed_moor.load_state_dict(state)
    train(resumed, resumed_optimizer)
    assert len(resumed_moor.coverage().held) == 4


# Tied and resized parameters


class Language(nn.Module):
    """An embedding tied to the output layer."""

    def __init__(self, words: int = 6, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(words, 4), nn.Linear(4, words, bias=bias)
        self.body = nn.Linear(4, 4)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(words)).tanh())


def read(model: Language, optimizer: torch.optim.Optimizer, steps: int = 3, words: int = 6) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        tokens = torch.arange(words)
        nn.functional.cross_entropy(model(tokens), (tokens + step) % words).backward()
        optimizer.step()


def test_exclusion_of_one_name_of_a_tied_parameter_names_the_other():
    model = Language()
    with pytest.warns(UnheldWarning, match=r"frees 'embed.weight' too.*tied to 'head.weight'.*leave 'head.weight' out"):
        moor = mooring.attach(model, sgd(model), exclude="head")
    moor.detach()
    assert entry(moor, "embed.weight").status == "free by request"
    mooring.attach(model, sgd(model), exclude=["head", "embed"]).detach()


def test_exclusion_of_a_module_with_two_names_does_not_warn():
    model = Language()
    model.same_body = model.body
    mooring.attach(model, sgd(model), exclude="body").detach()


def grown_in_place(model: Language, words: int) -> None:
    """Resize as transformers does: the data of the parameter is replaced."""
    rows = torch.randn(words, 4)
    count = min(words, len(model.embed.weight))
    rows[:count] = model.embed.weight.detach()[:count]
    model.embed.weight.data = rows
    if model.head.bias is not None:
        model.head.bias.data = torch.cat([model.head.bias.data, torch.zeros(words)])[:words]


def grown_anew(model: Language, words: int) -> None:
    """Resize by new modules that begin with the old rows."""
    old, count = model.embed.weight.detach(), min(words, len(model.embed.weight))
    model.embed, head = nn.Embedding(words, 4), nn.Linear(4, words, bias=model.head.bias is not None)
    with torch.no_grad():
        model.embed.weight[:count] = old[:count]
        if head.bias is not None:
            head.bias[:count] = model.head.bias[:count]
    head.weight, model.head = model.embed.weight, head


MEMORIES = {
    "scores": {"pull": mooring.Penalty(1e3, clamp=True)},
    "uniform": {"importance": "uniform", "pull": mooring.Proximal(1e3)},
    "8bit": {"memory": mooring.Memory(previous="8bit"), "pull": mooring.Proximal(1e3)},
    "si": {"importance": "si"},
}


@pytest.mark.parametrize("options", MEMORIES)
@pytest.mark.parametrize("grow", [grown_in_place, grown_anew])
def test_resized_embedding_keeps_its_old_rows_held_and_new_rows_free(grow, options):
    model = Language()
    model.embed = nn.Embedding(6, 16)  # rows long enough for blocks of eight bits
    model.body, model.head = nn.Linear(16, 4), nn.Linear(4, 6)
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, **MEMORIES[options])
    read(model, optimizer)
    moor.consolidate()
    anchor, previous = moor.anchor["embed.weight"].clone(), moor.previous["embed.weight"].clone()
    rows = torch.cat([model.embed.weight.detach(), torch.ones(3, 16)])
    if grow is grown_in_place:
        model.embed.weight.data = rows.clone()
    else:
        model.embed = nn.Embedding(9, 16, _weight=rows.clone())
    optimizer = sgd(model)
    moor.rebind(optimizer)
    optimizer.zero_grad()
    (model(torch.arange(9)).square().mean()).backward()
    optimizer.step()
    torch.testing.assert_close(moor.anchor["embed.weight"], torch.cat([anchor, torch.ones(3, 16)]))
    torch.testing.assert_close(moor.previous["embed.weight"], torch.cat([previous, torch.zeros(3, 16)]))
    assert previous.any()
    free = rows[6:] - 0.1 * model.embed.weight.grad[6:]
    torch.testing.assert_close(model.embed.weight[6:].detach(), free)
    assert entry(moor, "embed.weight").status == "held"
    moor.consolidate()
    assert moor.previous["embed.weight"].shape == (9, 16)


@pytest.mark.parametrize("grow", [grown_in_place, grown_anew])
@pytest.mark.parametrize("words", [4, 9])
def test_resized_layer_keeps_its_kronecker_factors(grow, words):
    model = Language(bias=True)
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, importance=Kronecker(), pull=mooring.Budget(1e-6))
    read(model, optimizer)
    moor.consolidate()
    grow(model, words)
    optimizer = sgd(model)
    moor.rebind(optimizer)
    read(model, optimizer, words=words)
    assert moor.pull_energy() <= 1.01e-6
    assert entry(moor, "head.bias").status == "held"
    energies = []
    for row in range(words):
        with torch.no_grad():
            model.head.bias.copy_(moor.anchor["head.bias"])
            energies.append(moor.pull_energy())
            model.head.bias[row] += 1.0
            energies[-1] = moor.pull_energy() - energies[-1]
    assert all(energy > 1e-3 for energy in energies[:6])
    assert energies[6:] == pytest.approx([0.0] * (words - min(words, 6)), abs=1e-6)


def test_drift_and_energy_are_known_right_after_an_embedding_is_resized():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer)
    nn.functional.cross_entropy(model(torch.arange(5)), torch.arange(5)).backward()
    optimizer.step()
    moor.consolidate()
    model[0].weight.data = torch.cat([model[0].weight.data, torch.ones(2, 4)])
    assert moor.anchor["0.weight"].shape == (7, 4)
    assert moor.drift() == {"0": 0.0, "1": 0.0}
    assert moor.pull_energy() == 0


def test_parameter_resized_in_the_middle_of_a_task_continues():
    model = Language()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, pull=mooring.Penalty(1.0))
    read(model, optimizer)
    moor.consolidate()
    read(model, optimizer)
    anchor, current = moor.anchor["embed.weight"].clone(), moor.current["embed.weight"].clone()
    grown_in_place(model, 8)
    optimizer.zero_grad()
    moor.optimizer.step()  # without gradients nothing is resized yet
    read(model, optimizer, 1, words=8)
    assert torch.equal(moor.anchor["embed.weight"][:6], anchor)
    assert moor.steps == 4
    moor.consolidate()
    assert bool((current > 0).any())
    assert moor.previous["embed.weight"].shape == (8, 4)


def test_parameter_of_another_width_starts_anew_and_is_named():
    model, optimizer, moor = once_moored()
    model[0].weight.data = torch.randn(8, 6)
    optimizer.zero_grad()
    model(torch.randn(5, 6)).square().mean().backward()
    with pytest.warns(UnheldWarning, match="'0.weight' changed its shape after the last task"):
        optimizer.step()
    assert moor.anchor["0.weight"].shape == (8, 6)
