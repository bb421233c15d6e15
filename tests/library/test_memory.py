"""Tests of every memory option: its bytes, its numbers, its checkpoints, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import mooring
import mooring.state.offload
from mooring import EWC, MAS, SI, Budget, Interpolation, Memory, Penalty, Proximal, Random, RWalk, Uniform
from mooring.errors import MooringError
from mooring.rules import Blend, Kronecker
from mooring.testing import check_equal

HALF = torch.bfloat16
MODES = {
    "full": Memory(),
    "bf16": Memory(anchor=HALF, previous=HALF, current=HALF),
    "8bit": Memory(previous="8bit"),
    "host": Memory(host=True),
    "lean": Memory(previous="8bit", current=HALF, host=True),
}
NONE = replace(MODES["lean"], current="none")
PULLS = [Interpolation(), Penalty(2.0), Penalty(50.0, clamp=True), Proximal(3.0), Blend(0.3), Budget(1e-4)]
UNREAD = [pull for pull in PULLS if not isinstance(pull, Interpolation)]
"""Pulls that do not read the current importance."""


def built(memory=None, importance=None, pull=None, dtype=torch.float32, **options):
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 48), nn.Tanh(), nn.Linear(48, 5)]
    model = nn.Sequential(*layers).to(dtype)
    groups = [{"params": model[0].parameters(), "lr": 0.03}, {"params": model[2:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return mooring.attach(model, optimizer, importance=importance, pull=pull, memory=memory, **options)


def batch(number, dtype=torch.float32):
    data = torch.Generator().manual_seed(number)
    return torch.randn(8, 64, generator=data).to(dtype), torch.randint(5, (8,), generator=data)


def trained(moor, first, steps, passes=2):
    """Train with gradients accumulated over several passes."""
    dtype = next(moor.model.parameters()).dtype
    for index in range(first, first + steps):
        moor.optimizer.zero_grad()
        for part in range(passes):
            x, y = batch(100 * index + part, dtype)
            (nn.functional.cross_entropy(moor.model(x), y) / passes).backward()
        moor.optimizer.step()
    return moor


def two_tasks(moor):
    trained(moor, 0, 4).consolidate()
    return trained(moor, 4, 4)


def weights(moor):
    return {name: p.detach().clone() for name, p in moor.model.named_parameters()}


def everything(moor):
    kept = {f"moor {name}": t.clone() for name, t in moor.state_dict().items()}
    return weights(moor) | kept


def bytes_of(moor):
    """Return the bytes of the state per weight of the matrices, without the header and vectors."""
    matrices = {name: p for name, p in moor.model.named_parameters() if p.ndim > 1 and p.requires_grad}
    kept = [t for name, t in moor.state_dict().items() if name.partition(".")[2] in matrices]
    return sum(t.numel() * t.element_size() for t in kept) / sum(p.numel() for p in matrices.values())


@pytest.mark.parametrize(
    ("dtype", "memory", "most"),
    [
        (torch.float32, Memory(), 12),
        (HALF, Memory(), 10),
        (torch.float32, Memory(previous="8bit"), 9.2),
        (HALF, Memory(previous="8bit", current=HALF), 5.2),
        (torch.float32, Memory(anchor=HALF, previous="8bit", current="none"), 3.2),
        (HALF, Memory(previous="8bit", current="none"), 3.2),
    ],
    ids=str,
)
def test_state_uses_the_stated_bytes_per_weight(dtype, memory, most):
    moor = built(memory, pull=Proximal(1.0), dtype=dtype, reference=[batch(1, dtype), batch(2, dtype)])
    trained(moor, 0, 1)
    assert most - 0.3 <= bytes_of(moor) <= most


@pytest.mark.parametrize("mode", MODES)
def test_excluded_and_frozen_parameters_have_no_state(mode):
    moor = built(MODES[mode], exclude="4")
    moor.model[0].weight.requires_grad_(False)
    names = {key.partition(".")[2] for key in two_tasks(moor).state_dict()} - {""}
    assert names == {"0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize("pull", PULLS, ids=repr)
def test_offloaded_anchors_give_the_same_parameters(pull):
    check_equal(
        "on the host", everything(two_tasks(built(MODES["host"], pull=pull))), everything(two_tasks(built(pull=pull)))
    )


@pytest.mark.parametrize("importance", [EWC(), SI(), RWalk(), Random()], ids=repr)
@pytest.mark.parametrize("pull", [*PULLS, Interpolation(every=2), Interpolation(every="task")], ids=repr)
def test_offloading_in_groups_gives_the_same_parameters(pull, importance, monkeypatch):
    if isinstance(pull, Budget) and not isinstance(importance, EWC):
        pytest.skip("a budget is spent in curvature, which of these only EWC measures")
    near = two_tasks(built(importance=importance, pull=pull))
    near.consolidate()
    monkeypatch.setattr(mooring.state.offload, "is_offloaded", lambda m: True)
    moor = built(Memory(host=True, staging=1 << 15), importance, pull)
    two_tasks(moor).consolidate()
    check_equal("staged", everything(moor), everything(near))
    rooms = [room.bytes.numel() for room in moor._states.offload.slots.values()]
    assert sorted(rooms) == [
        2048,
        24_576,
    ]  # a slot for each large weight alone, and one for the small ones
    assert all(m.staged is None for m in moor._states.records.values())


def test_each_group_is_prefetched_once(monkeypatch):
    """Anchors are constant in a task, so the first groups, or all if they fit, are there when the next step starts."""
    fetched, copy = [], mooring.state.offload._copy

    def copied(room, records) -> None:
        fetched.append(len(records))
        copy(room, records)

    monkeypatch.setattr(mooring.state.offload, "is_offloaded", lambda m: True)
    monkeypatch.setattr(mooring.state.offload, "_copy", copied)
    for size, once in ((1 << 15, 4), (1 << 20, 0)):  # alternating groups; all in one group
        moor = built(Memory(host=True, staging=size))
        trained(moor, 0, 1).consolidate()
        fetched.clear()
        trained(moor, 1, 1)
        first = len(fetched)
        trained(moor, 2, 1)
        assert len(fetched) - first == once
        assert first == once + (2 if once else 1)


def test_anchors_are_not_fetched_if_nothing_reads_them(monkeypatch):
    monkeypatch.setattr(mooring.state.offload, "is_offloaded", lambda m: True)
    copied = []
    monkeypatch.setattr(mooring.state.offload, "_copy", lambda room, records: copied.append(len(records)))
    trained(built(Memory(host=True)), 0, 3)  # before the first consolidation there is no pull
    moor = built(Memory(host=True), pull=Interpolation(every=10))
    trained(moor, 0, 1).consolidate()
    trained(moor, 1, 5)
    assert not copied


@pytest.mark.parametrize("pull", PULLS, ids=repr)
def test_eight_bit_importance_hardly_changes_the_parameters(pull):
    """Parameters change by a few thousandths of their movement, as the bound on R says."""
    start = weights(built())
    full, coded = (weights(two_tasks(built(memory, pull=pull))) for memory in (None, Memory(previous="8bit")))
    for name, weight in full.items():
        assert float((coded[name] - weight).norm()) <= 0.01 * float((weight - start[name]).norm())


def test_eight_bit_storage_is_used_for_matrices_and_merged_in_full_precision():
    moor = two_tasks(built(Memory(previous="8bit"), MAS(), Interpolation(every=100)))
    full = two_tasks(built(None, MAS(), Interpolation(every=100)))
    assert moor.state_dict()["previous.0.weight"].dtype == torch.uint8
    assert moor.state_dict()["previous.0.bias"].dtype == torch.float32
    moor.consolidate()
    full.consolidate()
    for name, score in full.previous.items():
        torch.testing.assert_close(moor.previous[name], score, rtol=0.06, atol=0)  # quantized twice


@pytest.mark.parametrize("pull", UNREAD, ids=repr)
def test_unread_importance_need_not_be_stored(pull):
    reference = [batch(1), batch(2)]
    kept, none = (built(memory, pull=pull, reference=reference) for memory in (None, Memory(current="none")))
    trained(kept, 0, 4)
    trained(none, 0, 4)
    check_equal("nothing kept of the task", weights(none), weights(kept))
    assert not any(key.startswith("current.") for key in none.state_dict())
    assert not any(bool(score.any()) for score in none.current.values())


@pytest.mark.parametrize("importance", [None, MAS(), Kronecker()], ids=repr)
def test_task_without_stored_importance_is_consolidated_from_data(importance):
    moor = built(Memory(current="none"), importance, Budget(0.1), reference=[batch(1), batch(2)])
    assert moor._step.outputs is None
    trained(moor, 0, 2)
    with pytest.raises(MooringError, match=r"this task has no importance.*consolidate\(data=\.\.\.\)"):
        moor.consolidate()
    before = {name: t.clone() for name, t in moor.previous.items()}
    moor.consolidate(data=[batch(3), batch(4)])
    assert moor.tasks == 2
    assert not torch.equal(moor.previous["0.weight"], before["0.weight"]) or isinstance(importance, Kronecker)
    trained(moor, 2, 1)


@pytest.mark.parametrize("importance", [Uniform(), Random()], ids=repr)
def test_constant_scores_exist_without_training(importance):
    runs = [two_tasks(built(memory, importance, Proximal(3.0))) for memory in (None, Memory(current="none"))]
    check_equal("scores from nowhere", weights(runs[1]), weights(runs[0]))


@pytest.mark.parametrize("pull", [Interpolation(), Penalty(2.0), Budget(1e-4)], ids=repr)
@pytest.mark.parametrize("mode", [*MODES, "none"])
def test_resumed_training_equals_uninterrupted_training_for_every_memory_option(mode, pull, tmp_path):
    memory, reference = (NONE, [batch(1), batch(2)]) if mode == "none" else (MODES[mode], None)
    if (mode == "none" and isinstance(pull, Interpolation)) or (memory.current == HALF and isinstance(pull, Budget)):
        pytest.skip("refused, as test_incompatible_options_are_refused_in_one_line sees")
    moor = built(memory, pull=pull, reference=reference)
    trained(moor, 0, 3)
    if mode != "none":
        moor.consolidate()
        trained(moor, 3, 2)
    for name, part in (("model", moor.model), ("optimizer", moor.optimizer), ("moor", moor)):
        torch.save(part.state_dict(), tmp_path / name)
    expected = everything(trained(moor, 5, 2))
    other = built(memory, pull=pull)
    for name, part in (("model", other.model), ("optimizer", other.optimizer), ("moor", other)):
        part.load_state_dict(torch.load(tmp_path / name))
    check_equal("resumed", everything(trained(other, 5, 2)), expected)


@pytest.mark.parametrize("to", MODES)
@pytest.mark.parametrize("mode", MODES)
def test_state_loads_with_other_memory_options(mode, to):
    moor = two_tasks(built(MODES[mode]))
    other = built(MODES[to])
    other.load_state_dict(moor.state_dict())
    assert {k: v.dtype for k, v in other.state_dict().items()} == {
        k: v.dtype for k, v in two_tasks(built(MODES[to])).state_dict().items()
    }
    for name, score in moor.previous.items():
        torch.testing.assert_close(other.previous[name].float(), score.float(), rtol=0.06, atol=0)
    trained(other, 8, 1).consolidate()


def test_estimated_state_loads_with_less_memory_and_back():
    full = built(pull=Budget(0.1), reference=[batch(1), batch(2)])
    lean = built(NONE, pull=Budget(0.1))
    lean.load_state_dict(full.state_dict())
    assert bytes_of(lean) < 5.2
    again = built(pull=Budget(0.1))
    again.load_state_dict(lean.state_dict())
    trained(again, 0, 1).consolidate()
    trained(lean, 0, 1)
    other = built(pull=Budget(0.1))
    other.load_state_dict(lean.state_dict())  # in the middle of a task whose first steps accumulated nothing
    assert other.needs_data
    with pytest.raises(MooringError, match=r"this task has no importance.*consolidate\(data=...\)"):
        other.consolidate()


def test_estimate_is_stored_until_it_is_consolidated():
    moor = built(NONE, EWC(), Proximal(2.0))
    moor.estimate([batch(1), batch(2)])
    other = built(NONE, EWC(), Proximal(2.0))
    other.load_state_dict(moor.state_dict())
    for mooring_ in (moor, other):
        mooring_.consolidate()
    check_equal("consolidated later", everything(other), everything(moor))


def test_state_without_quantization_has_version_1():
    for memory, version in ((None, 1), (Memory(previous="8bit"), 2)):
        header = two_tasks(built(memory)).state_dict()["mooring"]
        assert f'"version": {version}'.encode() in bytes(header.tolist())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda s: {k: v for k, v in s.items() if k != "previous_step.2.weight"},
            "'previous_step.2.weight' is missing",
        ),
        (lambda s: s | {"previous_high.2.weight": torch.zeros(2, 2)}, "'previous_high.2.weight' is missing, or not of"),
        (lambda s: s | {"previous.2.bias": s["previous.2.bias"].to(torch.uint8)}, "'previous_high.2.bias'"),
    ],
)
def test_quantized_state_that_does_not_fit_is_refused(spoil, message):
    moor = two_tasks(built(Memory(previous="8bit")))
    state = {name: t.clone() for name, t in moor.state_dict().items()}
    with pytest.raises(MooringError, match=message):
        moor.load_state_dict(spoil(state))
    check_equal("nothing changed", moor.state_dict(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "8bit"}, "memory='8bit' is not allowed: give mooring.Memory"),
        (
            {"memory": Memory(current="none"), "pull": mooring.Interpolation()},
            "Interpolation weighs the importance on this task",
        ),
        ({"memory": MODES["bf16"], "importance": EWC(decay=None)}, "EWC.*is a mean over the task.*give the importance"),
        ({"memory": MODES["8bit"], "importance": SI(sign="signed")}, "SI.*has negative scores"),
        ({"memory": MODES["8bit"], "importance": Kronecker(), "pull": Budget(1.0)}, "keeps factors and no scores"),
    ],
)
def test_incompatible_options_are_refused_in_one_line(options, message):
    with pytest.raises(MooringError, match=message) as error:
        mooring.attach(model := nn.Linear(3, 2), torch.optim.SGD(model.parameters(), lr=0.1), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{"anchor": "8bit"}, {"previous": "4bit"}, {"previous": torch.int8}, {"current": "8bit"}, {"staging": 0}]
)
def test_unknown_memory_options_are_refused(options):
    with pytest.raises(MooringError, match="is not allowed"):
        Memory(**options)


def scored(memory, importance, scale=1.0, **options):
    """Train a step on a loss of some scale, so that the scores have the scale's square, or on outputs of that scale."""
    moor = built(memory, importance, pull=Proximal(1.0), **options)
    if isinstance(importance, MAS):
        with torch.no_grad():
            moor.model[4].weight.mul_(scale)
    x, y = batch(1)
    (nn.functional.cross_entropy(moor.model(x), y) * (1 if isinstance(importance, MAS) else scale)).backward()
    moor.optimizer.step()
    return moor


@pytest.mark.parametrize(("importance", "scale"), [(EWC(), 1e-4), (MAS(), 1e4)], ids=repr)
def test_bfloat16_keeps_scores_of_any_size(importance, scale):
    moor = scored(Memory(current=HALF, previous=HALF), importance, scale)
    moor.consolidate()
    assert all(bool(score.any()) and bool(score.isfinite().all()) for score in moor.previous.values())


@pytest.mark.parametrize("slot", ["current", "previous"])
def test_float16_is_refused_for_importances(slot):
    with pytest.raises(MooringError, match=rf"{slot}=torch.float16 rounds small .*give {slot}=torch.bfloat16\Z"):
        Memory(**{slot: torch.float16})
    Memory(anchor=torch.float16)


@pytest.mark.parametrize(
    "importance", [EWC(decay=0.999), MAS(decay=0.999), mooring.Balanced(EWC(decay=0.999))], ids=repr
)
def test_decay_that_a_narrow_dtype_rounds_away_is_refused(importance):
    with pytest.raises(MooringError, match=r"decay=0\.999 adds 0\.001 of each score.*torch\.bfloat16 rounds away"):
        built(Memory(current=HALF), importance)
    built(Memory(current=HALF), RWalk(decay=0.999))  # its average is in full precision
    built(Memory(previous=HALF), importance)


@pytest.mark.parametrize("slot", ["anchor", "previous", "current"])
def test_float8_memory_is_refused(slot):
    with pytest.raises(MooringError, match=r"float8.* is not allowed: give a floating-point dtype of 16 bits or more"):
        Memory(**{slot: torch.float8_e4m3fn})
