"""Tests of run specifications: the key is the same in every process and depends on everything that a result does."""

import json
import math
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooring.errors import MooringError
from mooring_lab.model.spec import RunSpec, rate_factor

SPEC = RunSpec(
    stream="digits",
    data="0123456789abcdef",
    method="ewc",
    seed=3,
    network="mlp",
    lr=0.02,
    strength=10.0,
    epochs=5,
    batch=20,
    momentum=0.9,
    weight_decay=1e-4,
    memory=None,
    heads="inherit",
    init="",
    dtype="float32",
)
PINNED = "6a0a25bb3edec3c86e6eeea33b96f502"
"""The key of SPEC. Stored studies find their results by key, so it may change only together with
`mooring_lab.model.spec.VERSION`, when the same specification gives another result."""

OTHER = {
    "data": "another",
    "method": "mas",
    "seed": 4,
    "network": "cnn6",
    "lr": 0.03,
    "strength": None,
    "epochs": 6,
    "batch": 21,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "memory": 500,
    "heads": "fresh",
    "init": "weights",
    "dtype": "float64",
    "schedule": "cosine",
    "flips": True,
    "shifts": 2,
    "buffers": "frozen",
    "optimizer": "adamw",
}


def test_key_equals_the_key_in_stored_studies():
    assert SPEC.key == PINNED


def test_key_is_the_same_in_another_process():
    code = (
        "import json, sys; from mooring_lab.model.spec import RunSpec; "
        "print(RunSpec.from_json(json.load(sys.stdin)).key)"
    )
    text = json.dumps(SPEC.to_json(), sort_keys=True)
    process = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=True)
    assert process.stdout.strip() == PINNED


def test_key_depends_on_every_field_but_the_stream_name():
    assert {field.name for field in fields(RunSpec)} == {
        "stream",
        *OTHER,
    }  # decide about every new field
    keys = [SPEC.key, *(replace(SPEC, **{name: value}).key for name, value in OTHER.items())]
    assert len(set(keys)) == len(keys)
    assert replace(SPEC, stream="another name").key == SPEC.key


def test_later_fields_are_left_out_at_their_defaults_so_that_older_stores_are_found():
    assert not {"schedule", "flips", "shifts", "buffers", "optimizer"} & SPEC.to_json().keys()
    assert replace(SPEC, schedule="cosine").to_json() == {**SPEC.to_json(), "schedule": "cosine"}


def test_the_steps_schedule_divides_the_rate_by_ten_after_five_and_ten_twelfths_of_the_epochs():
    def rates(lr: float, epochs: int) -> list[float]:
        return [lr * rate_factor("steps", 3 * epoch + 2, 3 * epochs, epochs) for epoch in range(epochs)]

    assert rates(0.1, 60) == pytest.approx([0.1] * 25 + [0.01] * 25 + [0.001] * 10)  # the paper's
    assert [*rates(0.1, 1), *rates(1.0, 2)] == [0.1, 1.0, 0.1]
    assert rates(1.0, 12) == [1.0] * 5 + [0.1] * 5 + [0.01] * 2


def test_the_cosine_schedule_falls_along_half_a_cosine():
    expected = [1, 1, 0.5 + math.sqrt(0.125), 0.5 + math.sqrt(0.125), 0.5, 0.5, 0.5 - math.sqrt(0.125)]
    assert [rate_factor("cosine", step, steps=8, epochs=4) for step in range(7)] == pytest.approx(expected)


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 40, 1003])
def test_warmup_rises_over_a_tenth_of_the_steps_and_falls_to_zero(steps):
    """The schedule of `transformers.get_linear_schedule_with_warmup`, with a warm-up of at least one step."""
    transformers = pytest.importorskip("transformers", reason="the schedule is theirs")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, math.ceil(0.1 * steps), steps)
    expected = []
    for _ in range(steps):
        expected += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    factors = [rate_factor("warmup-linear", step, steps, epochs=1) for step in range(steps)]
    assert factors == pytest.approx(expected, rel=1e-12)


def test_the_constant_schedule_keeps_the_rate():
    assert {rate_factor("constant", step, steps=9, epochs=3) for step in range(9)} == {1.0}


def test_key_depends_on_the_last_bit_of_a_number():
    assert replace(SPEC, lr=0.020000000000000004).key != SPEC.key
    assert replace(SPEC, strength=10.000000000000002).key != SPEC.key


@pytest.mark.parametrize(("name", "integer"), [("strength", 10), ("lr", 1), ("momentum", 0), ("weight_decay", 0)])
def test_integer_and_float_of_equal_value_have_the_same_key(name, integer):
    """A study file gives `strength = 10`, the command line gives 10.0."""
    one, other = replace(SPEC, **{name: integer}), replace(SPEC, **{name: float(integer)})
    assert one == other
    assert one.key == other.key


numbers = st.floats(1e-12, 1e12)
specs = st.builds(
    RunSpec,
    stream=st.text(max_size=9),
    data=st.text("0123456789abcdef", max_size=9),
    method=st.sampled_from(["plain", "ewc", "er"]),
    seed=st.integers(0, 2**62),
    lr=numbers,
    strength=st.none() | numbers,
    epochs=st.integers(1, 99),
    batch=st.integers(1, 999),
    momentum=st.floats(0, 1, exclude_max=True),
    weight_decay=st.floats(0, 1),
    memory=st.none() | st.integers(1, 9999),
    heads=st.sampled_from(["inherit", "fresh"]),
    dtype=st.sampled_from(["float32", "float64"]),
    schedule=st.sampled_from(["constant", "steps", "cosine", "warmup-linear"]),
    flips=st.booleans(),
    shifts=st.integers(0, 9),
    buffers=st.sampled_from(["follow", "frozen"]),
    optimizer=st.sampled_from(["sgd", "adamw"]),
)


@given(specs)
def test_spec_survives_json(spec):
    restored = RunSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert restored == spec
    assert restored.key == spec.key
    assert hash(restored) == hash(spec)


def test_unknown_field_raises_an_error_that_names_it():
    with pytest.raises(MooringError, match="'nesterov', 'warmup': it was made by a newer version") as error:
        RunSpec.from_json({**SPEC.to_json(), "warmup": 3, "nesterov": True})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.0),
        ("lr", -1.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("lr", "0.1"),
        ("strength", -1.0),
        ("strength", float("inf")),
        ("momentum", 1.5),
        ("momentum", -0.1),
        ("weight_decay", -1e-9),
        ("epochs", 0),
        ("epochs", 1.5),
        ("epochs", True),
        ("batch", -1),
        ("memory", 0),
        ("seed", -1),
        ("seed", 0.5),
        ("seed", True),
        ("dtype", "float16"),
        ("heads", "new"),
        ("schedule", "linear"),
        ("optimizer", "adam"),
        ("flips", 1),
        ("shifts", -1),
        ("shifts", 0.5),
    ],
)
def test_invalid_value_raises_an_error_that_names_it(name, value):
    with pytest.raises(MooringError, match=name) as error:
        replace(SPEC, **{name: value})
    assert "\n" not in str(error.value)
    assert repr(value) in str(error.value)


def test_adamw_refuses_a_running_mean_that_never_moves():
    with pytest.raises(MooringError, match=r"momentum=1\.0 is not allowed with adamw") as error:
        replace(SPEC, optimizer="adamw", momentum=1.0)
    assert "\n" not in str(error.value)
    assert replace(SPEC, momentum=1.0).momentum == 1.0
