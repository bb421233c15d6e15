"""Tests of the benchmark of the amount of distillation, and that docs/budget.md says what its stored runs say."""

import importlib
import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch

from mooring import Budget
from mooring.hold import reference_gauges
from mooring_lab.model.metrics import paired_difference

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGE = (ROOT / "docs" / "budget.md").read_text()
TEXT = re.sub(r"\s+", " ", PAGE)
RUNS = [json.loads(line) for line in (ROOT / "docs" / "figures" / "distillation-amount.jsonl").read_text().splitlines()]
WHOLE = "a batch in every step"


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("sklearn", reason="needs scikit-learn")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("distillation_amount")


def test_schedule_holds_inside_its_block_alone(bench):
    batches = [torch.zeros(20, 3), torch.zeros(20, 3)]
    before = reference_gauges.distillation_schedule
    with bench.distilling("a fifth of a batch in every second step"):
        parts, every = reference_gauges.distillation_schedule(torch.nn.Linear(3, 2), batches)
    assert ([len(part) for part in parts], every) == ([4] * 10, 2)
    assert reference_gauges.distillation_schedule is before


def test_default_distils_the_digits_in_every_third_step_because_of_an_odd_batch(bench, monkeypatch):
    schedule, seen = reference_gauges.distillation_schedule, []

    def observe(model, batches, *, normalized):
        parts, every = schedule(model, batches, normalized=normalized)
        seen.append(([len(x) for x, _ in batches], every))
        return parts, every

    monkeypatch.setattr(reference_gauges, "distillation_schedule", observe)
    bench.Digits(None, 1).run(Budget(0.1), 0)
    assert seen == [([20] * 9 + [19], 3)]
    assert "The last batch of the 199 has 19 digits, so the default would distil half a batch in every third" in TEXT


def test_runs_in_miniature_fill_the_tables_and_are_not_repeated(bench, monkeypatch, tmp_path, capsys):
    kept = {name: bench.SCHEDULES[name] for name in ("half a batch in every second step", "none")}
    monkeypatch.setattr(bench, "SCHEDULES", kept)
    monkeypatch.setattr(bench, "AMOUNT", {"digits": (0.1,)})
    monkeypatch.setattr(bench, "MIXED", {"60 digits": (0.3,)})
    out = tmp_path / "runs.jsonl"
    brief = ["--seeds", "1", "--steps", "2", "--out", str(out)]
    assert bench.main(brief) == 0
    stored, captured = out.read_text(), capsys.readouterr()
    rows = [json.loads(line) for line in stored.splitlines()]
    assert [row["method"] for row in rows] == [*kept, "unmixed", "mixed"]
    assert "[4/4] 60 digits: mixed 0.3, seed 0" in captured.err
    half, none = rows[:2]
    assert f"| half a batch in every second step | 25 % | {half['old']:.1f} / {half['new']:.1f} |" in captured.out
    assert f"| none | 0 | {none['old']:.1f} / {none['new']:.1f} |" in captured.out
    assert f"| 0.3 | {rows[2]['held_out']:.3f} | " in captured.out
    assert bench.main(brief) == 0
    assert out.read_text() == stored


def test_adapters_run_in_miniature(bench, monkeypatch):
    pytest.importorskip("peft", reason="needs peft")
    spec = importlib.util.spec_from_file_location("adapters", BENCHMARKS / "adapters.py")  # as a folder of tests
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "adapters", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "base_of", lambda seed: module.pretrained(seed, 1))
    with bench.distilling("mixed"):
        row = bench.Adapters(1).run(Budget(0.1), 0)
    assert row.keys() == {"before", "old", "new"}
    assert all(0 < value <= 100 for value in row.values())


def test_every_cell_of_the_tables_has_five_seeds(bench):
    options = bench.make_parser().parse_args([])
    stored = [(f"{row['problem']}: {row['method']}", row["nats"], row["seed"]) for row in RUNS]
    assert options.seeds == 5
    assert sorted(stored) == sorted(bench.choices(options))


def test_tables_of_the_page_are_those_of_the_stored_runs(bench):
    assert bench.amount_table(RUNS) in PAGE
    assert bench.mixture_table(RUNS) in PAGE


def mean(bench, *cell):
    return statistics.fmean(bench.values_of(RUNS, *cell))


def new_digits(bench, nats):
    """Return the mean accuracy on new digits without distillation, and the range with any amount of it."""
    means = {method: mean(bench, "digits", method, nats, "new") for method in bench.SCHEDULES}
    return means.pop("none"), min(means.values()), max(means.values())


def without_distillation(bench):
    (without, low, high), (other, other_low, other_high) = (new_digits(bench, nats) for nats in (0.03, 0.1))
    return (
        f"At 0.03 nats {without:.1f} % of the new digits are learned without distillation, and {low:.1f} to {high:.1f} "
        f"% with it. At 0.1 nats it is {other:.1f} % without, and {other_low:.1f} to {other_high:.1f} % with it."
    )


def differences(bench, problem, nats):
    """Return the differences of all schedules with distillation from a whole batch in every step, of old and new."""
    return [
        paired_difference(*(bench.values_of(RUNS, problem, name, nats, kind) for name in (method, WHOLE)))
        for method, schedule in bench.SCHEDULES.items()
        if schedule and method != WHOLE
        for kind in ("old", "new")
    ]


def amount_on_digits(bench):
    every = [difference for nats in (0.03, 0.1) for difference in differences(bench, "digits", nats)]
    assert all(difference.low < 0 < difference.high for difference in every)
    widest = max((difference.high - difference.low) / 2 for difference in every)
    return (
        "The 95 % interval of every difference from a batch in every step contains 0. The intervals are up to "
        f"± {widest:.1f} points wide"
    )


def lora_medians(bench, nats):
    """Return the median on new digits of LoRA for each schedule, by its cost in percent; runs can be far from it."""
    costs = {method: 100 * part[0] / part[1] if part else 0 for method, part in bench.SCHEDULES.items()}
    medians = {method: statistics.median(bench.values_of(RUNS, "LoRA", method, nats, "new")) for method in costs}
    return lambda low, high: [medians[method] for method in costs if low <= costs[method] <= high]


def amount_for_lora(bench):
    chosen = lora_medians(bench, 0.01)
    (whole,), quarter, less, (none,) = chosen(100, 100), chosen(25, 25), chosen(1, 20), chosen(0, 0)
    assert whole > max(quarter) > min(quarter) > max(less) > min(less) > none
    return (
        f"At 0.01 nats the median over seeds on new digits is {whole:.1f} % with a batch in every step, "
        f"{min(quarter):.1f} to {max(quarter):.1f} with a quarter of that work, {min(less):.1f} to {max(less):.1f} "
        f"with less, and {none:.1f} without distillation."
    )


def larger_budgets_for_lora(bench):
    spans = [max(values) - min(values) for values in (lora_medians(bench, nats)(0, 100) for nats in (0.03, 0.1))]
    return f"At 0.03 and 0.1 nats all medians are within {spans[0]:.1f} and {spans[1]:.1f} points."


def lora_runs_that_lose(bench):
    distilling = [method for method, schedule in bench.SCHEDULES.items() if schedule]
    runs = [row for row in RUNS if row["problem"] == "LoRA" and row["method"] in distilling]
    lost = sorted(row["new"] for row in runs if row["new"] < 70)
    assert len(lost) == 2
    return (
        f"Two of the {len(runs)} runs with distillation learned far less, {lost[0]:.1f} and {lost[1]:.1f} %. They "
        "ended above the budget, and the return towards the anchor gave up much of what they had learned."
    )


def mixtures_of_more_digits(bench):
    """More than 300 inputs are not mixed by default."""
    cells = [bench.means(RUNS, "LoRA", method, 0.03) for method in ("mixed", "unmixed")]
    for kind in ("old", "new"):
        mixed, unmixed = (bench.values_of(RUNS, "LoRA", name, 0.03, kind) for name in ("mixed", "unmixed"))
        difference = paired_difference(mixed, unmixed)
        assert difference.low < 0 < difference.high
    return (
        f"With 420 digits to distil they changed little: LoRA at 0.03 nats kept {cells[0]['old']} and learned "
        f"{cells[0]['new']} % with mixtures, and {cells[1]['old']} and {cells[1]['new']} % without (five seeds)."
    )


def sixty_digits_before(bench):
    before = statistics.fmean(bench.values_of(RUNS, "60 digits", "mixed", 0.3, "before"))
    return f'"Held out" is the divergence on test data in nats; {before:.1f} % were right before.'


def mixtures_of_sixty_digits(bench):
    def gain(nats, kind):
        mixed, unmixed = (bench.values_of(RUNS, "60 digits", name, nats, kind) for name in ("mixed", "unmixed"))
        return paired_difference(mixed, unmixed)

    large = gain(0.3, "old")
    assert large.low > 0 > gain(0.3, "new").low
    small = [gain(nats, kind) for nats in (0.03, 0.1) for kind in ("old", "new", "held_out")]
    assert all(difference.low < 0 < difference.high for difference in small)
    return (
        f"With 0.3 nats mixtures keep {large.mean:.1f} points more (95 % interval {large.low:.1f} to {large.high:.1f}, "
        "in one of nine comparisons) and learn as much. With smaller budgets no difference is larger than its interval."
    )


SENTENCES = [
    without_distillation,
    amount_on_digits,
    amount_for_lora,
    larger_budgets_for_lora,
    lora_runs_that_lose,
    mixtures_of_more_digits,
    sixty_digits_before,
    mixtures_of_sixty_digits,
]


@pytest.mark.parametrize("write", SENTENCES, ids=lambda write: write.__name__)
def test_sentence_of_the_page_is_what_the_runs_say(bench, write):
    assert write(bench) in TEXT
