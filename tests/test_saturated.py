"""The benchmark of what a budget promises where curvature is almost 0 says what its page says, in its form."""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_a_row_for_each_task_and_way(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("saturated")
    monkeypatch.setattr(bench, "train", lambda *told, **rest: None)  # what it learns takes minutes
    monkeypatch.setattr(bench, "KNOWN", 2 * bench.BATCH)
    monkeypatch.setattr(sys, "argv", ["saturated.py", "--seeds", "1"])
    bench.main()
    printed = capsys.readouterr().out.splitlines()
    page = (ROOT / "docs" / "budget.md").read_text()
    assert printed[0] in page
    assert len(printed) == 1 + len(bench.TASKS) * len(bench.HELD)
    for line in printed[1:]:
        assert line[:36].rstrip() in page
