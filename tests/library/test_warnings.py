"""Warnings and errors for everything that would leave a model unprotected or pull it to the wrong place."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss

import mooring
from mooring.errors import MooringError, UnheldWarning


def small(outputs: int = 3, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 4)).log_softmax(1).square().mean().backward()
        optimizer.step()


def once_moored(**options) -> tuple[nn.Sequential, torch.optim.SGD, mooring.Mooring]:
    """Return a model, its optimizer and its Mooring after a first task."""
    model = small()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, **options)
    train(model, optimizer)
    moor.consolidate()
    return model, optimizer, moor


# Training with another optimizer


def test_training_with_another_optimizer_warns_at_consolidation():
    model, _, moor = once_moored()
    previous = {name: score.clone() for name, score in moor.previous.items()}
    train(model, sgd(model))
    with pytest.warns(UserWarning, match=r"'0.weight' and 3 others moved .* moor.rebind\(optimizer\)"):
        moor.consolidate()
    assert moor.tasks == 1
    torch.testing.assert_close(dict(moor.previous), previous)
    assert max(moor.drift().values()) == 0  # the anchors are the present parameters


def test_rebound_optimizer_does_not_warn():
    model, _, moor = once_moored()
    again = sgd(model)
    moor.rebind(again)
    train(model, again)
    moor.consolidate()
    assert moor.tasks == 2


@pytest.mark.parametrize("merge", ["average", "sum", "max"])
def test_consolidation_without_a_step_changes_nothing_and_says_so(merge):
    _, _, moor = once_moored(merge=merge)
    before = {key: tensor.clone() for key, tensor in moor.state_dict().items()}
    for _ in range(3):
        with pytest.warns(UserWarning, match="no step since the last task, so it has no effect"):
            moor.consolidate()
    after = moor.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_consolidation_without_a_step_does_not_increase_the_budget():
    energies = []
    for extra in (0, 3):
        model = small()
        optimizer = sgd(model)
        known = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(4)]
        moor = mooring.attach(model, optimizer, reference=known)
        for _ in range(extra):
            with pytest.warns(UserWarning, match="no effect"):
                moor.consolidate()
        train(model, optimizer, steps=30)
        energies.append(moor.pull_energy())
    assert energies[0] == energies[1]


# References without information


def test_single_output_is_refused_if_labels_must_be_sampled():
    model = small(outputs=1)
    with pytest.raises(MooringError, match=r"single output.*loss"):
        mooring.attach(model, sgd(model), reference=[torch.randn(8, 4)])
    optimizer = sgd(model)
    mooring.attach(model, optimizer, importance=mooring.EWC(labels="sampled"))
    with pytest.raises(MooringError, match="one output"):
        train(model, optimizer)


@pytest.mark.parametrize("importance", [mooring.EWC(), mooring.rules.Kronecker()])
def test_reference_without_importance_is_refused(importance):
    model = small(outputs=1)
    labels = torch.zeros(8, dtype=torch.int64)  # a softmax over one output is always 1
    with pytest.raises(MooringError, match=r"every importance on data is 0.*loss"):
        mooring.attach(
            model,
            sgd(model),
            importance=importance,
            pull=mooring.Budget(0.1, measured=False),
            reference=[(torch.randn(8, 4), labels)],
        )


@pytest.mark.parametrize("loss", [binary_cross_entropy_with_logits, mse_loss])
def test_labels_for_another_loss_are_refused_unless_a_loss_is_given(loss):
    model = small(outputs=1)
    known = [(torch.randn(8, 4), torch.rand(8, 1))]
    with pytest.raises(MooringError, match=r"not class indices: .*; for another loss give a loss"):
        mooring.attach(model, sgd(model), pull=mooring.Budget(0.1, measured=False), reference=known)
    moor = mooring.attach(model, sgd(model), reference=known, loss=lambda model, batch: loss(model(batch[0]), batch[1]))
    assert all(bool(score.any()) for score in moor.previous.values())


def test_parameters_unfrozen_after_the_reference_warn_once():
    model = small()
    model[0].requires_grad_(requires_grad=False)
    optimizer = sgd(model)
    mooring.attach(model, optimizer, reference=[(torch.randn(8, 4), torch.randint(3, (8,)))])
    train(model, optimizer)
    model[0].requires_grad_(requires_grad=True)
    with pytest.warns(
        UserWarning, match="'0.weight' and 1 other did not train when importance was estimated"
    ) as warned:
        train(model, optimizer)
    assert len(warned) == 1


def test_parameters_unfrozen_after_a_resumed_reference_warn():
    model = small()
    model[0].requires_grad_(requires_grad=False)
    state = mooring.attach(model, sgd(model), reference=[(torch.randn(8, 4), torch.randint(3, (8,)))]).state_dict()
    optimizer = sgd(model)
    importance = mooring.EWC(decay=None, per_sample=True)
    resumed = mooring.attach(model, optimizer, importance=importance, pull=mooring.Budget(0.1))
    resumed.load_state_dict(state)
    model[0].requires_grad_(requires_grad=True)
    with pytest.warns(UserWarning, match="'0.weight' and 1 other did not train when importance was estimated"):
        train(model, optimizer)


def test_head_added_after_the_reference_warns_that_it_is_free():
    model = small()
    optimizer = sgd(model)
    known = [(torch.randn(8, 4), torch.randint(3, (8,)))]
    mooring.attach(model, optimizer, reference=known)
    model.append(nn.Linear(3, 2))
    optimizer.add_param_group({"params": [*model[3].parameters()]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer)
    free, unmeasured = (str(warning.message) for warning in caught if warning.category is UnheldWarning)
    assert re.search("'3.weight' and 1 other appeared after the last task .*exclude it", free)
    assert "so forgetting is only estimated" in unmeasured  # the outputs have another shape


# States loaded elsewhere

OTHERS = {
    "importance": ({"importance": mooring.SI(damping=0.001)}, {"importance": mooring.SI(damping=1.0)}),
    "merge": ({"merge": "average"}, {"merge": "max"}),
    "buffers": ({"buffers": "follow"}, {"buffers": "frozen"}),
}


@pytest.mark.parametrize("option", OTHERS)
def test_state_of_other_options_warns(option):
    one, other = OTHERS[option]
    model, optimizer, moor = once_moored(**one)
    state = moor.state_dict()
    moor.detach()
    with pytest.warns(UserWarning, match=rf"the state was made with .*give attach {option}="):
        mooring.attach(model, optimizer, **other).load_state_dict(state)


def test_state_of_other_weights_warns():
    *_, moor = once_moored()
    fresh = small(seed=1)
    with pytest.warns(UserWarning, match="weights differ from those that the state was saved with"):
        mooring.attach(fresh, sgd(fresh)).load_state_dict(moor.state_dict())


def test_state_of_equal_or_rounded_weights_or_an_unfinished_task_does_not_warn():
    model, optimizer, moor = once_moored()
    same = small(seed=1)
    same.load_state_dict(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mooring.attach(same, sgd(same)).load_state_dict(moor.state_dict())
        rounded = small(seed=1).to(torch.bfloat16)
        rounded.load_state_dict(model.state_dict())
        mooring.attach(rounded, sgd(rounded)).load_state_dict(moor.state_dict())
        train(model, optimizer)
        other = small(seed=1)
        mooring.attach(other, sgd(other)).load_state_dict(moor.state_dict())


# Where a warning points


def load_a_state_of_other_weights():
    *_, moor = once_moored()
    fresh = small(seed=1)
    mooring.attach(fresh, sgd(fresh)).load_state_dict(moor.state_dict())


def load_a_state_of_other_options():
    model, optimizer, moor = once_moored(merge="max")
    moor.detach()
    mooring.attach(model, optimizer, merge="average").load_state_dict(moor.state_dict())


def give_labels_that_equal_inputs():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4))
    ids = torch.randint(4, (2, 5))
    mooring.attach(model, sgd(model)).estimate([(ids, ids)], loss=None)


def consolidate_without_a_step():
    model = small()
    mooring.attach(model, sgd(model)).consolidate()


def train_other_weights():
    model, optimizer, _ = once_moored()
    model.load_state_dict(small(seed=1).state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step()


@pytest.mark.parametrize(
    "cause",
    [
        load_a_state_of_other_weights,
        load_a_state_of_other_options,
        give_labels_that_equal_inputs,
        consolidate_without_a_step,
        train_other_weights,
    ],
)
def test_warning_points_at_the_line_of_the_caller(cause):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cause()
    assert caught
    assert {warning.filename for warning in caught} == {__file__}


# A budget without a reference

UNREFERENCED = (
    r"Budget\(0.1\) has no reference and the model was trained before .*nothing is held or measured in this task"
)


def normed(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


@pytest.mark.parametrize("measured", [True, False])
@pytest.mark.parametrize(
    "kind", [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), torch.optim.AdamW, torch.optim.Adagrad]
)
def test_budget_without_a_reference_warns_at_the_first_step_of_a_trained_optimizer(kind, measured):
    model = small()
    optimizer = kind(model.parameters())
    train(model, optimizer)
    mooring.attach(model, optimizer, pull=mooring.Budget(0.1, measured=measured))
    with pytest.warns(UnheldWarning, match=UNREFERENCED + r".*attach\(reference=\.\.\.\)") as caught:
        train(model, optimizer)
    assert len(caught) == 1
    assert "\n" not in str(caught[0].message)


def test_budget_without_a_reference_warns_with_an_optimizer_that_counts_the_steps_of_each_row():
    model = small()
    optimizer = sgd(model)
    optimizer.state[model[0].weight]["step"] = torch.tensor([0.0, 3.0])
    mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    with pytest.warns(UnheldWarning, match="the optimizer has already taken steps"):
        train(model, optimizer, steps=1)


def test_budget_without_a_reference_warns_of_loaded_weights_of_normalization_layers():
    trained = normed()
    train(trained, sgd(trained))
    model = normed(1)
    model.load_state_dict(trained.state_dict())
    optimizer = sgd(model)
    mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    with pytest.warns(UnheldWarning, match="the weights of '1' are not those of a new layer"):
        train(model, optimizer, steps=1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_budget_in_a_first_task_from_scratch_does_not_warn(kind):
    model = normed()
    nn.init.normal_(model[1].weight, 1.0, 0.02)  # as in some networks that are new; their biases are 0
    optimizer = kind(model.parameters(), lr=0.01)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    assert repr(moor).endswith("; nothing held yet: first task, nothing to measure)")
    for _ in range(2):
        train(model, optimizer)
        moor.consolidate()
    assert "forgetting=estimated" in repr(moor)


def test_budget_does_not_warn_if_a_state_is_loaded_before_the_first_step():
    model, _, moor = once_moored(pull=mooring.Budget(0.1))
    trained = torch.optim.AdamW(model.parameters())
    moor.rebind(trained)
    train(model, trained)
    moor.consolidate()
    moor.detach()
    mooring.attach(model, trained, pull=mooring.Budget(0.1)).load_state_dict(moor.state_dict())
    train(model, trained)


def test_budget_does_not_warn_if_data_is_consolidated_before_the_first_step():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    moor.consolidate(data=[torch.randn(8, 4) for _ in range(4)])
    train(model, optimizer)


def test_other_pulls_do_not_warn_of_a_missing_reference():
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    mooring.attach(model, optimizer)
    train(model, optimizer)


@pytest.mark.parametrize("method", ["finish", "measured"])
def test_measuring_in_a_first_task_says_that_nothing_is_held(method):
    model = small()
    moor = mooring.attach(model, sgd(model), pull=mooring.Budget(0.1))
    with pytest.raises(MooringError, match=r"nothing is held and nothing can be measured: give attach reference="):
        getattr(moor, method)()
