"""Tests of the benchmark of several tasks, and of its table in docs/start/fine-tune.md."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "figures" / "several-tasks.jsonl"


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("several_tasks")


@pytest.mark.filterwarnings("ignore")  # a network that is hardly trained
def test_runs_in_miniature_are_not_repeated(bench, tmp_path, capsys):
    out = tmp_path / "tasks.jsonl"
    for _ in range(2):
        assert bench.main(["--seeds", "1", "--epochs", "1", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["optimizer"], row["end"]) for row in rows] == [(o, e) for o in bench.OPTIMIZERS for e in bench.ENDS]
    assert "| AdamW | `consolidate(data=...)` |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--epochs", "2", "--out", str(out)])


def test_table_of_the_page_is_what_the_runs_say(bench):
    rows = [json.loads(line) for line in STORED.read_text().splitlines()]
    assert {row["seed"] for row in rows} == set(range(5))
    assert bench.table(rows) in (ROOT / "docs" / "start" / "fine-tune.md").read_text()
