"""Tests of the page: its parts and their order, its numbers, cost and command."""

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import mooring
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.study.pretraining import RECIPES
from mooring_lab.study.study import Study
from mooring_paper.ablations import explain, measure_effects
from mooring_paper.changes import BASE
from mooring_paper.claims.claim import Claim
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import EXPLICIT, PAPER
from mooring_paper.context.seed_statistics import summarize_seeds
from mooring_paper.context.target_result import ResultTable, TargetResult
from mooring_paper.page.page_writer import write_page
from mooring_paper.page.protocol_table import protocol_table
from mooring_paper.page.provenance import backbones_table, missing_data_lines, training_summary
from mooring_paper.page.verdict import answer, difference_lines, verdict_sentences
from mooring_paper.paper_command import _portable_command
from mooring_paper.published.published_numbers import published
from mooring_paper.tables import accuracy_tables
from mooring_paper.tables.accuracy_tables import OUR_SETTINGS, PAPER_SETTINGS
from mooring_paper.targets import select_targets

CIFAR, FLOWERS = PAPER.conditions()[:2]  # one epoch
SEEDS = range(5)


def run(method="plain", seed=0, **fields):
    spec = RunSpec("digits, trained", "ab" * 16, method, seed, **fields)
    versions = {"device": "NVIDIA H200", "torch": "2.0", "python": "3.11", "mooring": "0.1"}
    return Result(spec, "finished", "", [10.0], [[90.0]], steps=700, seconds=30.0, versions=versions)


def scored(method, seed, accuracy, forgetting):
    """A run over two tasks with this accuracy and forgetting."""
    last = accuracy + forgetting
    matrix = [[last, 10.0], [accuracy - forgetting, last]]
    return Result(RunSpec("cifar100", "0", method, seed, lr=0.001), "finished", "", [10.0, 10.0], matrix)


def table(condition, shifts, settings=OUR_SETTINGS, seeds=SEEDS):
    """A table of `table1` in which methods differ from the paper's accuracy by so many points, with a small spread."""
    results = []
    for method, shift in shifts.items():
        cell = published(condition.network, condition.regime.name, condition.data, method)
        mean = 70.0 if cell is None else cell.accuracy
        forgetting = 0.5 if cell is None else cell.forgetting
        results += [scored(method, seed, mean + shift + 0.02 * (seed - 2), forgetting) for seed in seeds]
    rows = summarize_seeds(results)
    cells = [accuracy_tables._cells(condition, row, at_paper_setting=settings == PAPER_SETTINGS) for row in rows]
    values = [accuracy_tables._table_row(condition, row, cell) for row, cell in zip(rows, cells, strict=True)]
    with_paper = [cell for by_metric in cells for cell in by_metric.values() if cell is not None]
    return ResultTable(f"{condition}, {settings}", list(values[0]), values, with_paper)


def both(condition, shifts):
    return [table(condition, shifts, settings) for settings in (OUR_SETTINGS, PAPER_SETTINGS)]


def claims(**verdicts):
    rows = [
        Claim(f"{name} is so.", "x > 0", "+1.00 [+0.50, +1.50]; more", "2", v).to_row() for name, v in verdicts.items()
    ]
    return TargetResult("claims", ["Claims."], [ResultTable("Group", list(rows[0]), rows)])


SHIFTS = {"plain": -12.0, "explicit-ewc": 0.4, "explicit-mas": 5.0, "explicit-si": 5.2, "er": 3.0, "frozen": 0.0}
MOMENTUM, START = "explained by momentum 0", "explained by a random start"
REASONS = {
    (CIFAR, "plain", "accuracy"): [MOMENTUM],
    (CIFAR, "explicit-mas", "accuracy"): [MOMENTUM, START],
    (CIFAR, "explicit-si", "accuracy"): [START],
    (CIFAR, "er", "accuracy"): ["not explained by any change that was tested"],
}
CHANGED = {"method": "plain", "changed": "momentum 0", "accuracy": "12.34", "accuracy: what it does": "explains it"}


@pytest.fixture
def results():
    reasons = ResultTable("every change", list(CHANGED), [CHANGED])
    return [
        TargetResult("table1", ["All."], both(CIFAR, SHIFTS)),
        TargetResult("reasons", ["Why."], [reasons], reasons=REASONS),
        claims(first="holds", second="does not hold", third="not decided"),
    ]


@pytest.fixture
def folder(results, fresh_context, tmp_path):
    write_page(results, tmp_path / "out", fresh_context, command="mooring paper all")
    return tmp_path / "out"


@pytest.fixture
def data_folder(tmp_path):
    for name in ("cifar100", "flowers102"):
        (tmp_path / "data" / name).mkdir(parents=True)
    return tmp_path / "data"


# What a reproduction was made from


def test_summary_gives_models_iterations_time_and_device():
    summary = training_summary([run(), run(seed=1), run(seed=2)])
    assert "3 models were trained (3 finished), 2,100 iterations" in summary
    assert "1 min 30 s on NVIDIA H200" in summary
    assert "Of this" not in summary
    published, other = run("si-as-published"), run(seed=5)
    elsewhere = replace(other, spec=replace(other.spec, stream="caltech101, trained"))
    summary = training_summary([run(), published, elsewhere])
    assert "Of this, the authors' code 30.0 s, data that stand in 30.0 s." in summary


def test_missing_data_sets_are_named(tmp_path, data_folder):
    context = PaperContext(Study(tmp_path / "p.sqlite"), PAPER.with_data(data_folder))
    (line,) = missing_data_lines(context)
    assert line.startswith("caltech256: **not yet run**. Put it at `DIR/caltech256` in its public folder layout")


def test_backbones_have_the_accuracy_and_recipe_of_their_files(tmp_path, data_folder):
    files = [tmp_path / f"{name}.safetensors" for name in ("papers", "cosine", "unknown")]
    recorded = {"accuracy": 78.2, "stream": "cifar10, all at once", **asdict(RECIPES["paper"])}
    contents = [recorded, {**recorded, "epochs": 30, "schedule": "cosine"}, None]
    for number, (file, content) in enumerate(zip(files, contents, strict=True)):
        metadata = {"mooring": json.dumps(content)} if content else None
        save_file({"w": torch.full((1,), float(number))}, file, metadata=metadata)
    context = PaperContext(Study(tmp_path / "p.sqlite"), PAPER.with_data(data_folder), {"cnn6": files})
    rows = backbones_table(context).rows
    assert [row.get("recipe") for row in rows] == [
        "that of the authors' code",
        "epochs 30, schedule cosine",
        None,
        None,
    ]
    assert [row.get("accuracy") for row in rows] == [78.2, 78.2, None, None]
    assert rows[3] == {"network": "resnet18-third", "backbone": "none: random start"}


def test_protocol_table_says_what_is_done_here_from_the_code():
    table = protocol_table(replace(PAPER, seeds=4), {"tf32", "bf16"}, {"epochs 30"})
    rows = {row["item"]: row for row in table.rows}
    assert rows["seeds"]["here"] == f"4, up to {PAPER.max_seeds} for claims they leave undecided"
    assert rows["precision"]["here"] == "bf16, tf32"
    assert rows["recipe of the backbone"]["here"].startswith("epochs 30 (60 epochs")
    assert rows["data sets"]["here"] == "cifar100, flowers102, caltech256"
    assert rows["momentum"]["here"] == f"{RunSpec('digits', '0', 'plain', 0).momentum:g}, reset at each task"
    assert rows["running average"]["here"].startswith(f"{1 - mooring.EWC().decay:g} on the new score")
    assert rows["damping of SI and RWalk"]["here"].startswith(f"{mooring.RWalk().damping:g};")
    assert rows["R where no importance is known (0/0)"]["here"] == "0: stays free"
    assert all(len(row) == 5 and all(row.values()) for row in rows.values())


# The verdict, and what differs


def test_verdict_counts_cells_within_bounds_within_chance_and_by_family(results):
    cells, families, explained, verdicts = verdict_sentences(results)
    # Of 5 methods with paper's numbers, forgetting is the paper's in all; accuracy is within 1 point in one.
    assert cells.startswith(
        "**6 of 10 cells of the main table agree with the paper**: 6 within 1.0 points of accuracy or 0.3"
    )
    assert (
        "explicit step 4 of 6, plain fine-tuning 1 of 2, replay 1 of 2; at the settings of our own search, 6 of 10"
        in families
    )
    assert explained == (
        "**1 of 4 differences are not explained** by any change that was tested; 3 are explained, and 0 perhaps."
    )
    assert verdicts == "**Of 3 claims, 1 hold**, 1 do not hold, and 1 are not decided."


def test_answer_is_two_sentences_from_the_counts(results):
    (text,) = answer(results)
    assert text.startswith("**Does the paper reproduce? In part**: at its own settings our runs agree with 6 of 10")
    assert "1 of its 3 claims hold. The explicit step reproduces best (4 of 6 numbers)" in text
    every = [TargetResult("table1", [], both(CIFAR, {"plain": 0.1, "er": 0.1})), claims(first="holds")]
    assert answer(every)[0].startswith("**Does the paper reproduce? Yes**")
    assert answer(results[:1]) == []


def test_page_begins_with_the_table_at_the_papers_settings():
    tables = [table(CIFAR, {"plain": -12.0}), table(CIFAR, {"plain": 0.2}, PAPER_SETTINGS)]
    cells, families = verdict_sentences([TargetResult("table1", [], tables)])
    assert cells.startswith("**2 of 2 cells")
    assert families.endswith("at the settings of our own search, 1 of 2 in all.")


def test_a_cell_with_one_seed_is_neither_equal_nor_different():
    (sentence, _) = verdict_sentences([TargetResult("table1", [], [table(CIFAR, {"plain": -12.0}, seeds=[0])])])
    assert sentence.startswith("**1 of 2 cells")
    assert "With too few seeds, 1 cell cannot be judged." in sentence


def test_cells_with_the_same_reason_share_a_line(results):
    """The cell that two changes explain is listed with one of them only."""
    lines = difference_lines(results[0], OUR_SETTINGS, REASONS)
    members = "1-epoch, cifar100: accuracy of plain, explicit-mas by -12.00 to +5.00."
    assert lines[0] == f"**Explained by momentum 0** (2 cells): {members}"
    assert lines[1].startswith(
        "**Explained by a random start** (1 cell): 1-epoch, cifar100: accuracy of explicit-si by +5.20"
    )
    assert lines[2].startswith("**Not explained by any change that was tested** (1 cell)")
    assert len(lines) == 3


def test_a_complete_family_has_one_name():
    result = TargetResult("table1", [], both(CIFAR, dict.fromkeys(EXPLICIT, 5.0)))
    reasons = {(CIFAR, method, "accuracy"): [START] for method in EXPLICIT}
    (line,) = difference_lines(result, OUR_SETTINGS, reasons)
    assert (
        line == "**Explained by a random start** (4 cells): 1-epoch, cifar100: accuracy of the explicit step by +5.00."
    )


def test_a_cell_without_a_reason_says_what_is_missing():
    result = TargetResult("table1", [], both(FLOWERS, {"plain": -12.0}))
    assert difference_lines(result, OUR_SETTINGS, REASONS)[0].startswith(
        "**No change was tested under this condition**"
    )
    alone = TargetResult("table1", [], [table(CIFAR, {"plain": -12.0})])
    assert difference_lines(alone, OUR_SETTINGS, {})[0].startswith("**No seed finished at the paper's setting")
    assert difference_lines(result, OUR_SETTINGS, None) == [
        "1 cell differs from the paper; `mooring paper reasons` tests why."
    ]


def test_reasons_of_the_ablations_are_grouped_by_their_change():
    before = [scored("ewc", seed, 58.0 + 0.02 * seed, 2.07) for seed in SEEDS]
    after = [scored("ewc", seed, 62.5 + 0.02 * seed, 2.07) for seed in SEEDS]
    tested = {BASE.name: before, "momentum 0": after, "weight decay 1e-4": after}
    effects = measure_effects((CIFAR, "ewc"), tested, "accuracy")
    reasons = {(CIFAR, "ewc", "accuracy"): explain({"accuracy": effects}, "accuracy")}
    (line,) = difference_lines(TargetResult("table1", [], both(CIFAR, {"ewc": -4.5})), OUR_SETTINGS, reasons)
    assert re.match(r"\*\*Explained by (momentum 0|weight decay 1e-4)\*\* \(1 cell\)", line)
    unexplained = measure_effects((CIFAR, "ewc"), {BASE.name: before, "momentum 0": before}, "accuracy")
    reasons = {(CIFAR, "ewc", "accuracy"): explain({"accuracy": unexplained}, "accuracy")}
    (line,) = difference_lines(TargetResult("table1", [], both(CIFAR, {"ewc": -4.5})), OUR_SETTINGS, reasons)
    assert line.startswith("**Not explained by any change that was tested** (1 cell)")


# The page


def test_parts_are_in_order_and_details_are_folded(folder):
    text = (folder / "index.md").read_text()
    order = [
        "Does the paper reproduce?",
        "cells of the main table agree",
        "Table 1 beside",
        "What differs, and why",
        "Details",
        "<details",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    titles = re.findall(r"<summary>(.*?)</summary>", text)
    assert [title.partition(":")[0] for title in titles[:3]] == ["table1", "reasons", "claims"]
    assert len(titles) == text.count('<details markdown="1">') == text.count("</details>") == 6


def test_compact_table_marks_cells_that_differ(folder):
    page = (folder / "index.md").read_text()
    assert "| plain | **43.3 ≠ 55.3**<br>9.13 / 9.13 |" in page
    assert "| explicit-ewc | 64.2 / 63.8<br>0.08 / 0.08 |" in page
    assert "| frozen | 70.0<br>0.50 |" in page


def test_every_number_of_the_compact_table_is_in_the_findings(folder):
    lines = (folder / "index.md").read_text().splitlines()
    rows = [line for line in lines[: lines.index("## What differs, and why")] if line.startswith("| ")][2:]
    findings = {entry["target"]: entry for entry in json.loads((folder / "findings.json").read_text())}
    detailed = {row["method"]: row for row in findings["table1"]["tables"][0]["rows"]}
    assert len(rows) == len(SHIFTS)
    for row in rows:
        method, accuracy, forgetting = (text.strip(" *") for text in re.split(r"\||<br>", row.strip("|")))
        for text, metric, digits in ((accuracy, "accuracy", 1), (forgetting, "forgetting", 2)):
            names = (metric, f"paper's {metric}")
            numbers = [float(detailed[method][name].split()[0]) for name in names if detailed[method][name]]
            assert re.findall(r"[\d.]+", text) == [f"{number:.{digits}f}" for number in numbers]


def test_findings_have_every_sentence_and_table_of_the_page(folder):
    (page,) = [entry for entry in json.loads((folder / "findings.json").read_text()) if entry["target"] == "page"]
    known = "\n".join(
        [*page["text"], *(str(value) for t in page["tables"] for row in t["rows"] for value in row.values())]
    )
    markdown = re.sub(
        r"```.*?```|<[^>]*>|^#.*|reasons:.*|claims:.*", "", (folder / "index.md").read_text(), flags=re.S | re.M
    )
    for number in re.findall(r"\d+\.\d+", markdown):
        assert number in known, number


def test_long_tables_stay_in_the_findings(folder):
    page = (folder / "index.md").read_text()
    assert "12.34" in (folder / "findings.json").read_text()
    assert "12.34" not in page
    assert "| momentum 0 | 1 | 0 | 0 | 0 |" in page
    assert "[findings.json](findings.json)" in page


def test_figures_are_in_the_page_and_in_files(fresh_context, tmp_path):
    (result,) = [target.run(fresh_context) for target in select_targets(["effective-lr"])]
    page = write_page([result], tmp_path / "out", fresh_context, command="mooring paper effective-lr")
    assert "(effective-lr-age.png)" in page.read_text()
    assert (tmp_path / "out" / "effective-lr-age.svg").exists()
    assert result.text[0] in page.read_text()


# Runs, cost and command


def test_command_on_the_page_has_no_local_folders(monkeypatch):
    words = ["paper", "all", "--data", "/here/data", "--init=/here/a.safetensors", "--init", "/here/b.safetensors"]
    monkeypatch.setattr(sys, "argv", ["mooring", *words])
    command = _portable_command(Path("/here/data"), [Path("/here/a.safetensors"), Path("/here/b.safetensors")])
    assert command == "mooring paper all --data DIR --init=a.safetensors --init b.safetensors"


def test_command_on_the_page_trains_instead_of_reading_results(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["mooring", "paper", "all", "--trained-on", "cuda"])
    assert _portable_command(None, []) == "mooring paper all --device cuda"
