"""A page is written again from its own files: the stored one is what its runs say, and nothing is lost on the way."""

import json
import shutil

import pytest

from mooring.errors import MooringError
from mooring_lab.study.study import Study
from mooring_paper.targets import run_targets, select_targets
from paper.stored import STORED, StoredPage, stored_page


@pytest.fixture(scope="module")
def page():
    return StoredPage.read(STORED)


@pytest.mark.slow
def test_stored_reproduction_is_what_its_own_runs_say(tmp_path, capsys):
    assert stored_page.main([str(STORED), "--out", str(tmp_path / "again")]) == 0
    for name in ("index.md", "findings.json", "runs.json"):
        assert (tmp_path / "again" / name).read_text() == (STORED / name).read_text(), name


def test_every_stored_run_is_read_with_its_key_and_counts(page):
    content = json.loads((STORED / "runs.json").read_text())
    by_key = {result.spec.key: result for result in page.runs.values()}
    assert len(by_key) == len(content["runs"])
    for row in content["runs"]:
        result = by_key[row["key"]]
        sizes = content["streams"][row["stream"]]["test"]
        counts = [[round(a * n / 100) for a, n in zip(line, sizes, strict=False)] for line in result.matrix]
        assert counts == row.get("correct", [])
        assert (result.status, len(result.stability)) == (row["status"], len(row.get("stability", [])))


def test_runs_that_are_not_stored_are_refused_in_one_line(page, tmp_path):
    context = page.context(Study(tmp_path / "none.sqlite"))
    condition = context.scale.conditions()[0]
    unknown = context.spec(condition, "plain", 77, next(iter(page.runs)))
    assert not context.has([unknown])
    with pytest.raises(MooringError, match=r"lacks 1 run, such as plain on cifar100, trained: train them") as error:
        context.run([unknown])
    assert "\n" not in str(error.value)


def test_a_target_from_stored_runs_equals_the_stored_one(page, tmp_path):
    (roots,) = run_targets(select_targets(["roots"]), page.context(Study(tmp_path / "none.sqlite")))
    (stored,) = (entry for entry in json.loads((STORED / "findings.json").read_text()) if entry["target"] == "roots")
    assert roots.to_json() == {name: value for name, value in stored.items() if name != "figures"}


@pytest.mark.parametrize("damage", ["missing", "broken", "changed"])
def test_a_folder_without_a_readable_page_is_refused_in_one_line(damage, tmp_path):
    if damage != "missing":
        for name in ("runs.json", "findings.json"):
            shutil.copy(STORED / name, tmp_path)
        path, text = tmp_path / "runs.json", (STORED / "runs.json").read_text()
        path.write_text(text[:-100] if damage == "broken" else text.replace('"lr":0.001', '"lr":0.002', 1))
    with pytest.raises(MooringError, match="has no page of `mooring paper` that can be read") as error:
        StoredPage.read(tmp_path)
    assert "\n" not in str(error.value)
    assert stored_page.main([str(tmp_path)]) == 2
