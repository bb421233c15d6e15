"""The claims about depth, balanced importance, roots and the unrolled form, in miniature."""

import math

import pytest

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_paper.claims import layer_claims
from mooring_paper.claims.claim import claim_on_count
from mooring_paper.claims.method_pairs import Evidence
from mooring_paper.claims.sequential_verdict import LookSchedule
from mooring_paper.context.scale import MINIATURE, REGULARIZERS
from mooring_paper.context.seed_statistics import mean_difference, summarize_seeds


@pytest.fixture(scope="module")
def claims(context):
    return layer_claims.claims(Evidence(context, LookSchedule((2,))))


def test_every_claim_has_a_verdict(claims):
    assert len({claim.statement for claim in claims}) == len(claims) == 11
    assert {claim.verdict for claim in claims} <= {"holds", "does not hold", "not decided"}
    assert all(claim.ours and claim.definition for claim in claims)


def test_unrolled_form_equals_the_iterates(claims):
    assert claims[0].verdict == "holds"
    assert float(claims[0].ours) < 1e-12


def test_pairs_are_averaged_by_seed():
    difference = mean_difference(([1.0, 2.0], [0.0, 0.0]), ([3.0, math.nan], [0.0, 0.0]))
    assert (difference.mean, difference.count) == (pytest.approx(2.0), 2)
    assert mean_difference(([math.nan], [1.0])) is None


def test_definitions_that_could_not_be_measured_keep_a_claim_from_holding():
    claim = claim_on_count("", "", 2, 2, missing=1)
    assert (claim.ours, claim.verdict) == ("2 of 2; 1 more could not be measured", "not decided")
    assert claim_on_count("", "", 1, 2, missing=1).verdict == "does not hold"
    assert claim_on_count("", "", 0, 0, share=0.5).verdict == "not decided"


def test_halves_of_the_layers_are_compared_within_a_run():
    def run(seed):
        spec = RunSpec("digits", "0", "ewc", seed)
        return Result(spec, "finished", "", [10.0], [[90.0]], cka={"1": 0.9 + 0.01 * seed, "2": 0.7})

    rows = {name: summarize_seeds(map(run, range(2)))[0] for name in REGULARIZERS}
    rows |= {f"balanced-{name}": row for name, row in rows.items()}
    deep, *_ = layer_claims._balance(Evidence(None, LookSchedule((2,))), {MINIATURE.conditions()[0]: rows})
    assert deep.ours.startswith("+0.2050 ")
    assert "over 4 pairs (mlp, 1-epoch, digits)" in deep.definition
