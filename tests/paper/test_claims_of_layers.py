"""Depth, balance, roots and the unrolled form: in miniature each is decided, or said to be open."""

import math

import pytest

from mooring.lab.model.results import Result
from mooring.lab.model.spec import RunSpec
from mooring.lab.study.study import Study
from mooring.paper.claims import layer_claims as claims
from mooring.paper.claims.claim import by_seed, share, within
from mooring.paper.context.context import Laboratory
from mooring.paper.context.scale import MINIATURE
from mooring.paper.figures import cka


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    lab = Laboratory(Study(tmp_path_factory.mktemp("layers") / "p.sqlite"), MINIATURE.on(None))
    return claims.claims(lab)


def test_each_is_decided_or_open(found):
    assert len({claim.statement for claim in found}) == len(found) == 11
    assert {claim.verdict for claim in found} <= {"holds", "does not hold", "not decided"}
    assert all(claim.ours and claim.definition for claim in found)


def test_the_unrolled_form_is_the_iterates(found):
    assert found[0].verdict == "holds"
    assert float(found[0].ours) < 1e-12


def test_every_layer_is_early_or_deep():
    layers = {str(number): float(number) for number in range(5)}
    run = Result(RunSpec("digits", "0", "ewc", 0), "finished", "", [], [], cka=layers)
    assert (claims._shallow(run), cka.deep(run)) == (1.0, 3.5)
    assert math.isnan(claims._shallow(Result(run.spec, "unstable", "", [], [], cka=layers)))


def test_pairs_are_averaged_seed_by_seed():
    pairs = by_seed([([1.0, 2.0], [0.0, 0.0]), ([3.0, math.nan], [0.0, 0.0])])
    assert (pairs.mean, pairs.count) == (pytest.approx(2.0), 2)
    assert by_seed([([math.nan], [1.0])]) is None
    assert within(by_seed([([1.0], [0.0])]), 0, 2) == "not decided"  # one seed
    assert share(0, 0) == "not decided"
