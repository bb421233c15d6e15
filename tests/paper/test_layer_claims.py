"""The claims about depth, balanced importance, roots and the unrolled form, in miniature."""

import math

import pytest

from mooring.paper.claims import layer_claims
from mooring.paper.claims.claim import count_verdict, range_verdict
from mooring.paper.context.seed_statistics import mean_difference


@pytest.fixture(scope="module")
def claims(context):
    return layer_claims.claims(context)


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
    assert range_verdict(mean_difference(([1.0], [0.0])), 0, 2) == "not decided"  # one seed
    assert count_verdict(0, 0, 0.5) == "not decided"
