"""Targets trained together: the same findings as one after the other, in fewer fleets."""

import pytest

from mooring.lab.study.study import Study
from mooring.paper.context.context import Awaited, Laboratory
from mooring.paper.context.result import Finding
from mooring.paper.context.scale import MINIATURE
from mooring.paper.published.published_numbers import Setting
from mooring.paper.schedule import findings_of
from mooring.paper.targets import Target, chosen


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A laboratory that notes which runs were asked for together."""
    made = Laboratory(Study(tmp_path / "p.sqlite"), MINIATURE.on(None))
    made.lots = []
    train = made.study.run

    def noted(specs, *told, **more):
        made.lots.append([(spec.method, spec.seed, spec.lr) for spec in specs])
        return train(specs, *told, **more)

    monkeypatch.setattr(made.study, "run", noted)
    return made


def spec(lab, method, seed, lr=0.01):
    return lab.spec(MINIATURE.cases()[0], method, seed, Setting(lr, None), search=True)


def target(name, run):
    return Target(name, "", lambda scale: 0, run)


def searching(lab):
    """Two runs decide at which rate the third is trained."""
    tried = lab.run([spec(lab, "plain", 0, lr) for lr in (0.01, 0.02)], decides=True)
    best = max(tried.values(), key=lambda result: result.metrics["accuracy"]).spec
    found = lab.run([spec(lab, "plain", 1, best.lr)])
    return Finding("searching", ["found"], [], list(found.values()))


def waiting(lab):
    found = lab.run([spec(lab, "plain", seed) for seed in (0, 2)])
    return Finding("waiting", ["waited"], [], list(found.values()))


def test_what_decides_goes_ahead_and_the_rest_is_one_lot(lab):
    findings = findings_of([target("searching", searching), target("waiting", waiting)], lab)
    assert [finding.name for finding in findings] == ["searching", "waiting"]
    assert lab.lots[0] == [("plain", 0, 0.01), ("plain", 0, 0.02)]
    assert len(lab.lots) == 2
    assert {(method, seed) for method, seed, _ in lab.lots[1]} == {("plain", 1), ("plain", 2)}
    assert len(lab.study.results()) == 4, "the run that both asked for was trained once"


def test_findings_are_those_of_each_target_alone(lab, tmp_path):
    both = chosen(["fig-importance", "roots"])
    together = findings_of(both, lab)
    alone = Laboratory(Study(tmp_path / "alone.sqlite"), MINIATURE.on(None))
    assert len(lab.lots) == 1
    for found, each in zip(together, both, strict=True):
        expected = each.run(alone)
        assert (found.name, found.text) == (expected.name, expected.text)
        assert [table.rows for table in found.tables] == [table.rows for table in expected.tables]


def test_a_laboratory_trains_at_once_again_after_that(lab):
    findings_of([target("waiting", waiting)], lab)
    assert waiting(lab).name == "waiting"
    assert spec(lab, "plain", 5) in lab.run([spec(lab, "plain", 5)])


def test_what_goes_wrong_is_not_swallowed(lab):
    def broken(lab):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        findings_of([target("waiting", waiting), target("broken", broken)], lab)
    assert not lab.gathers


def test_who_gathers_is_told_what_is_missing(lab):
    lab.gathers = True
    with pytest.raises(Awaited, match="1 run has no result yet"):
        lab.run([spec(lab, "plain", 0)])
