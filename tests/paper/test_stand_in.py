"""The data set that stands in for Caltech-256 has tables and claims of its own, beside the paper's."""

import json
from dataclasses import replace

import pytest

from mooring.errors import MooringError
from mooring_lab.streams.options import StreamOptions
from mooring_lab.study.study import Study
from mooring_paper.claims import stand_in
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import CONTROLS, MINIATURE, PAPER, ROWS
from mooring_paper.page.page_writer import write_page

DIGITS = StreamOptions("digits", limit=50)


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    scale = replace(MINIATURE.with_data(None), stand_ins={"caltech101": replace(DIGITS, shuffle=3)})
    return PaperContext(Study(tmp_path_factory.mktemp("stand-in") / "p.sqlite"), scale)


@pytest.fixture(scope="module")
def result(context):
    return stand_in.run(context)


def test_every_method_is_searched_and_trained_in_both_regimes_without_a_number_of_the_paper(context, result):
    *tables, claims = result.tables
    assert [table.title for table in tables] == [
        f"mlp, {r.name}, caltech101, at our settings" for r in MINIATURE.regimes
    ]
    for table in tables:
        methods = {row["method"].split()[0] for row in table.rows}
        assert {"plain", "explicit-ewc", "er", *CONTROLS} <= methods <= {*ROWS, *CONTROLS}
        assert not table.cells
        assert all(row["paper's accuracy"] is None for row in table.rows)
    assert {run.spec.stream for run in result.results} == {"caltech101, searched", "caltech101, trained"}
    assert claims.title == stand_in.CLAIMS


def test_claims_are_tested_with_the_seeds_of_the_tables_and_ask_for_no_more(context, result):
    before = len(context.study.results())
    *_, claims = stand_in.run(context).tables
    assert len(context.study.results()) == before
    statements = [row["claim"] for row in claims.rows]
    assert statements[0] == "The explicit step is more accurate than its penalty on caltech101."
    assert {row["seeds"] for row in claims.rows} <= {"", str(context.scale.seeds)}


def test_gains_are_compared_with_those_on_balanced_classes(tmp_path):
    streams = {"cifar100": DIGITS}
    scale = replace(MINIATURE.with_data(None), streams=streams, stand_ins={"caltech101": replace(DIGITS, shuffle=3)})
    context = PaperContext(Study(tmp_path / "p.sqlite"), replace(scale, regimes=scale.regimes[:1]))
    *_, claims = stand_in.run(context).tables
    (row,) = [row for row in claims.rows if "with balanced classes" in row["claim"]]
    assert "(mlp, 1-epoch, caltech101), minus that over" in row["holds when"]


def test_page_has_it_in_a_part_of_its_own(context, result, tmp_path):
    page = write_page([result], tmp_path / "out", context, command="mooring paper stand-in").read_text()
    assert "<summary>stand-in: both regimes on Caltech-101" in page
    assert "1-epoch, caltech101" in page
    assert f"**{stand_in.CLAIMS}**" in page
    assert "Table 1 beside the paper's" not in page
    header = json.loads((tmp_path / "out" / "runs.json").read_text())
    assert header["scale"]["stand_ins"] == ["caltech101"]


def test_it_is_read_from_the_data_folder_if_it_is_there(tmp_path):
    (tmp_path / "cifar100").mkdir()
    assert PAPER.with_data(tmp_path).stand_ins == {}
    (tmp_path / "caltech101").mkdir()
    assert PAPER.with_data(tmp_path).stand_ins["caltech101"].data == str(tmp_path / "caltech101")
    assert PAPER.with_data(tmp_path, ("cifar100",)).stand_ins == {}
    assert "caltech101" not in PAPER.with_data(tmp_path).missing_data
    with pytest.raises(MooringError, match="caltech101 alone is no data set of the paper"):
        PAPER.with_data(tmp_path, ("caltech101",))


def test_without_its_images_nothing_is_trained(fresh_context):
    result = stand_in.run(fresh_context)
    assert (result.tables, result.results) == ((), ())
    assert result.text[0].startswith("Not run yet: put caltech101")
