"""Tests of the gauntlet: its design, its halves, that rows continue, and what is computed from them."""

import importlib
import json
from itertools import combinations
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def piece(monkeypatch):
    """Return a function that imports a module of the benchmark."""
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize("half", ["choice", "reported"])
def test_design_covers_all_pairs_of_levels_that_can_be_combined(piece, half):
    covering, problems = piece("gauntlet_runs.covering_design"), piece("gauntlet_problems.problem_set")
    cells = covering.design(half)
    assert len(set(cells)) == 120
    assert all(covering.possible(vars(cell)) for cell in cells)
    seen = {frozenset(pair) for cell in cells for pair in combinations(cell.levels(), 2)}
    wanted = {frozenset(pair) for pair in covering.pairs_to_cover([p.name for p in problems.problems_of(half)])}
    assert wanted <= seen
    assert frozenset({("tasks", 5), ("length", 1000)}) not in wanted


def test_halves_share_no_problem_and_have_all_of_them(piece):
    problems = piece("gauntlet_problems.problem_set")
    first, second = ({problem.name for problem in problems.problems_of(half)} for half in problems.HALVES)
    assert not first & second
    assert first | second == set(problems.PROBLEMS)
    assert len(problems.PROBLEMS) >= 20


def test_worlds_give_examples_that_their_networks_take(piece):
    problems = piece("gauntlet_problems.problem_set").PROBLEMS
    for problem in problems.values():
        torch.manual_seed(0)
        model, generator = problem.build(), torch.Generator().manual_seed(0)
        world = problem.world(generator)
        for task in range(problem.tasks + 1):
            model.use_head(task)
            x, labels = world(task, "test", 8, generator)
            outputs = model(x)
            assert outputs.shape[:-1] == labels.shape, problem.name
            assert 0 <= int(labels.min()) <= int(labels.max()) < outputs.shape[-1], problem.name


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion", "Muon", "Lookahead"])
def test_optimizers_lower_a_loss_and_call_hooks_once_a_step(piece, name):
    optimizers = piece("gauntlet_runs.extra_optimizers")
    torch.manual_seed(0)
    model, x = torch.nn.Linear(4, 3), torch.randn(64, 4)
    target, calls = torch.randn(64, 3), []
    optimizer = optimizers.OPTIMIZERS[name](model, 0.01)
    optimizer.register_step_post_hook(lambda *given: calls.append(1))
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert len(calls) == 50


def test_rows_of_a_tiny_run_are_continued_and_not_repeated(piece, tmp_path, capsys, monkeypatch):
    bench, methods = piece("gauntlet"), piece("gauntlet_runs.cell_methods")
    methods.prepared.cache_clear()
    monkeypatch.setattr(methods, "BEFORE_STEPS", 40)
    monkeypatch.setattr(methods, "TRIAL_STEPS", 5)
    options = ["--cells", "2", "--steps", "8", "--folder", str(tmp_path), "--label", "tiny"]
    assert bench.main(["run", *options, "--methods", "plain,kl 1"]) == 0
    assert "no cell has rows of mooring" in capsys.readouterr().out
    peers = tmp_path / "choice-peers.jsonl"
    whole = peers.read_text()
    peers.write_text(whole[: whole.rindex("{") + 20])  # killed in the middle of the last line
    assert bench.main(["run", *options, "--methods", "plain,mooring,kl 1"]) == 0
    printed = capsys.readouterr().out
    rows = [row for path in (peers, tmp_path / "choice-tiny.jsonl") for row in piece("run_log").read_rows(path)]
    cells = [cell.text for cell in piece("gauntlet_runs.covering_design").design("choice")[:2]]
    wanted = [(cell, method) for cell in cells for method in ("plain", "kl 1", "mooring")]
    assert sorted((row["cell"], row["method"]) for row in rows) == sorted(wanted)
    no_time = {"seconds": 0, "seconds_at_end": 0}
    again = {json.dumps({**row, **no_time}) for row in rows}
    assert {json.dumps({**json.loads(line), **no_time}) for line in whole.splitlines()} <= again
    for row in rows:
        assert (row["gauge"] is None) == (row["method"] != "mooring")
        assert row["gauge"] is None or row["gauge"] <= row["budget"] == (0.03 if "adapters" in row["cell"] else 0.1)
        assert 0 <= row["learned"] <= 1
        assert row["held_out"] >= 0
    assert "2 cells" in printed
    assert "min left" in (tmp_path / "choice-tiny.log").read_text()
    assert bench.main(["run", *options, "--methods", "plain,mooring,kl 1"]) == 0
    assert "min left" not in capsys.readouterr().out
    methods.prepared.cache_clear()


def test_criteria_count_what_is_lost(piece):
    covering, criteria = piece("gauntlet_runs.covering_design"), piece("gauntlet_runs.criteria")
    cells = covering.design("choice")[:4]

    def row(cell, method, learned, held_out, budget=0.1, gauge=None, warned=()):
        common = {
            "kept": 0.9,
            "final": 0.9,
            "seconds": 1.0,
            "seconds_at_end": 0.1,
            "failed": None,
            "seed": 0,
            "warnings_at_end": list(warned),
        }
        return {
            "cell": cell.text, "method": method, "learned": learned, "held_out": held_out, "budget": budget,
            "gauge": gauge, **common,
        }  # fmt: skip

    rows = [row(cell, "plain", 0.95, 3.0) for cell in cells]
    rows += [row(cell, "kl 1", 0.93, 0.04) for cell in cells]
    rows += [
        row(cells[0], "mooring", 0.94, 0.03, gauge=0.05),
        row(cells[1], "mooring", 0.50, 0.09, gauge=0.10, warned=["returned"]),
        row(cells[2], "mooring", 0.80, 0.05, gauge=0.10),
        row(cells[3], "mooring", 0.94, 0.20, gauge=0.11),
    ]
    results = criteria.results_of(cells, rows)
    counted = {name: [counts(result) for result in results] for name, counts in criteria.CRITERIA.items()}
    assert counted == {
        "below peer": [False, True, True, False],
        "silent": [False, False, True, False],
        "given up": [False, True, False, False],
        "held out": [False, False, False, True],
        "gauge": [False, False, False, True],
    }
    assert results[3].share("mooring") == 0
    assert results[0].share("mooring") == pytest.approx(0.94 / 0.95)
    printed = criteria.summary(results)
    assert "FAILS  below peer    2 cells" in printed
    assert "FAILS  share      0.589" in printed


def test_table_of_the_page_is_that_of_the_stored_rows(piece):
    page = Path(__file__).parents[2] / "docs" / "budget.md"
    assert piece("gauntlet").table_of_the_page() in page.read_text()
