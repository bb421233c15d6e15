"""Running statistics of normalization layers in fleets: merged with weights, followed or frozen."""

from dataclasses import replace

import pytest
import torch

from laboratory.small import Once, class_stream, spec_for, trained_by_hand
from mooring.errors import MooringError
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet
from mooring_lab.fleet.grouping import fleet_shape
from mooring_lab.model.spec import RunSpec
from mooring_lab.study.comparison import comparison

NORMALISED = "laboratory.test_fleet_equals:normalised"
STREAM = class_stream()
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def final(specs: list[RunSpec]) -> dict[str, dict[str, torch.Tensor]]:
    fleet = Fleet(specs, STREAM)
    order = [spec for group in fleet.strength_groups.values() for spec in group]
    fleet.run()
    return {spec.key: fleet.stack.network_of(row).state_dict() for row, spec in enumerate(order)}


def test_a_model_that_is_merged_all_of_the_way_back_forgets_nothing():
    spec = spec_for("wise-ft", STREAM, strength=1.0, network=NORMALISED)
    (result,) = Fleet([spec], STREAM).run()
    assert result.metrics["forgetting"] == 0
    assert result.metrics["forgetting_earlier"] == 0


@pytest.mark.parametrize("method", ["wise-ft", "imm-mean", "imm-mode", "cofima"])
def test_merged_statistics_equal_those_of_a_loop_with_attach(method):
    strengths = {"wise-ft": (0.2, 0.7), "cofima": (0.5, 3.0)}.get(method, (None,))
    specs = [spec_for(method, STREAM, seed, strength=s, network=NORMALISED) for seed in (0, 1) for s in strengths]
    weights = final(specs)
    for spec in specs:
        torch.testing.assert_close(weights[spec.key], trained_by_hand(spec, STREAM).state_dict(), **EXACT)


@pytest.mark.parametrize("buffers", ["follow", "frozen"])
@pytest.mark.parametrize("method", ["ewc", "explicit-mas", "wise-ft", "budget-kronecker"])
def test_statistics_equal_those_of_attach_with_the_same_option(method, buffers):
    specs = [spec_for(method, STREAM, seed, network=NORMALISED, buffers=buffers) for seed in (0, 1)]
    weights = final(specs)
    for spec in specs:
        torch.testing.assert_close(weights[spec.key], trained_by_hand(spec, STREAM).state_dict(), **EXACT)


def test_runs_with_other_statistics_are_other_runs_in_other_fleets():
    follow, frozen = (spec_for("ewc", STREAM, buffers=buffers) for buffers in ("follow", "frozen"))
    assert follow.key == spec_for("ewc", STREAM).key  # results of earlier versions are still found
    assert "buffers" not in follow.to_json()
    assert frozen.key != follow.key
    assert fleet_shape(frozen) != fleet_shape(follow)


@pytest.mark.parametrize("buffers", ["follow", "frozen"])
def test_statistics_continue_from_a_checkpoint(tmp_path, buffers):
    spec = spec_for("wise-ft", STREAM, network=NORMALISED, buffers=buffers)
    whole = Fleet([spec], STREAM)
    whole.run(Once(tmp_path / "fleet"))
    resumed = Fleet([spec], STREAM)
    checkpoint.restore(resumed, tmp_path / "fleet")
    resumed.run()
    states = [fleet.stack.network_of(0).state_dict() for fleet in (resumed, whole)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_methods_that_moor_nothing_follow_the_data():
    asked = comparison("digits", "plain,ewc", seeds=1, buffers="frozen")
    specs = asked.specs(asked.streams[0][1], "", "", "")
    assert {spec.method: spec.buffers for spec in specs} == {"plain": "follow", "ewc": "frozen"}


def test_unknown_option_is_refused_in_one_line():
    with pytest.raises(MooringError, match=r"unknown buffers 'forget'.*follow.*frozen") as error:
        replace(spec_for("ewc", STREAM), buffers="forget")
    assert "\n" not in str(error.value)


def test_stored_run_with_statistics_that_were_kept_is_refused_in_one_line():
    stored = {**spec_for("ewc", STREAM).to_json(), "buffers": "keep"}
    with pytest.raises(MooringError, match=r"unknown buffers 'keep'.*follow, frozen") as error:
        RunSpec.from_json(stored)
    assert "\n" not in str(error.value)
