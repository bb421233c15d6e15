"""Tables to paste: Markdown, LaTeX and CSV as written by hand, and winners in bold only where intervals allow it."""

import csv
import io
import json

import pytest

from mooring_lab.cli import main
from mooring_lab.cli.pasted_tables import TextTable, render
from mooring_lab.cli.terminal_tables import print_rows
from mooring_lab.model.results import Result
from mooring_lab.model.spec import BUFFERS, RunSpec
from mooring_lab.model.summary import Row, summarize
from mooring_lab.study.store import Store

TABLE = TextTable(
    "digits_2: 50 % ± & more",
    ("method", "accuracy %", "vs plain [95 %]"),
    (("plain", "80.50 ± 1.25", "+0.00 [-0.10, +0.10]"), ("ewc_1 1e+06", "91.00 ± 0.50", "")),
    frozenset({(1, 1)}),
)


def test_latex_uses_booktabs_math_and_bold():
    assert render(TABLE, "latex").splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{digits\_2: 50 \% $\pm$ \& more}",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"method & accuracy \% & vs plain [95 \%] \\",
        r"\midrule",
        r"plain & $80.50 \pm 1.25$ & $+0.00 [-0.10,\, +0.10]$ \\",
        r"ewc\_1 1e+06 & $\mathbf{91.00 \pm 0.50}$ &  \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


def test_markdown_and_csv_are_as_written_by_hand():
    assert render(TABLE, "markdown").splitlines() == [
        "digits_2: 50 % ± & more",
        "",
        "| method | accuracy % | vs plain [95 %] |",
        "| :--- | ---: | ---: |",
        "| plain | 80.50 ± 1.25 | +0.00 [-0.10, +0.10] |",
        "| ewc_1 1e+06 | **91.00 ± 0.50** |  |",
    ]
    lines = [
        "method,accuracy %,vs plain [95 %]",
        'plain,80.50 ± 1.25,"+0.00 [-0.10, +0.10]"',
        "ewc_1 1e+06,91.00 ± 0.50,",
    ]
    assert render(TABLE, "csv").splitlines() == lines


def rows_of(accuracies: dict[str, list[float]], status: str = "finished") -> list[Row]:
    """Return a row for each method, with an accuracy for each seed; nothing is forgotten."""
    results = [
        Result(RunSpec("digits", "0", method, seed), status, "", [10.0], [[value]])
        for method, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    return summarize(results)


@pytest.mark.parametrize(
    ("accuracies", "bold"),
    [
        ({"plain": [80.0, 81.0, 79.0], "ewc": [90.0, 91.5, 89.0]}, "ewc"),
        ({"plain": [80.0, 81.0, 79.0], "ewc": [90.0, 91.5, 89.0], "joint": [99.0, 99.1, 99.2]}, "ewc"),
        ({"plain": [80.0, 81.0, 79.0], "ewc": [81.0, 80.0, 80.5]}, None),
        ({"plain": [80.0, 81.0], "ewc": [90.0, 91.0]}, None),
        ({"plain": [80.0, 81.0, 79.0]}, None),
        ({"plain": [80.0, 81.0, 79.0], "ewc": [90.0, 91.0, 90.0], "mas": [90.0, 91.1, 90.0]}, None),
    ],
    ids=["ahead in every seed", "joint takes no part", "intervals overlap", "two seeds", "alone", "two are close"],
)
def test_bold_is_a_winner_whose_paired_intervals_exclude_0(capsys, accuracies, bold):
    print_rows(rows_of(accuracies), None, "markdown")
    lines = [line for line in capsys.readouterr().out.splitlines()[4:] if line.startswith("|")]
    marked = [line.split(" | ")[0].removeprefix("| ") for line in lines if "**" in line.split(" | ")[1]]
    assert marked == ([] if bold is None else [bold])


def test_bold_forgetting_is_the_smallest(capsys):
    results = [
        Result(
            RunSpec("digits", "0", method, seed), "finished", "", [10.0] * 2, [[90.0, 0.0], [90.0 - lost - seed, 90.0]]
        )
        for method, lost in (("plain", 30.0), ("ewc", 10.0))
        for seed in range(3)
    ]
    print_rows(summarize(results), None, "latex")
    ewc = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("ewc"))
    assert ewc.split(" & ")[2:4] == [r"$\mathbf{11.00 \pm 1.00}$", r"$\mathbf{5.50 \pm 0.50}$"]  # over T-1 and T tasks


def test_row_is_one_short_line():
    (row,) = rows_of({"plain": [80.0, 82.0]})
    assert (
        repr(row)
        == "<Row plain on digits, task-incremental: accuracy 81.00 ± 1.41 %, forgetting (T) 0.00 ± 0.00, 2 seeds>"
    )
    (row,) = rows_of({"plain": [80.0]}, "unstable")
    assert repr(row) == "<Row plain on digits, task-incremental: 1 seed, unstable in 1 of 1>"


# Commands


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def add_results(path: str, **accuracies: list[float]) -> None:
    Store(path).add([result for row in rows_of(accuracies) for result in row.results])


def test_differences_are_against_plain_unless_another_or_none_is_asked_for(run):
    add_results("mooring.sqlite", plain=[80.0, 81.0], ewc=[90.0, 93.0])
    differences = {
        options: [
            row["difference"] and row["difference"]["mean"]
            for row in json.loads(run("show", "--json", *options))["rows"]
        ]
        for options in ((), ("--baseline", "ewc"), ("--baseline", "none"))
    }
    assert list(differences.values()) == [[0.0, 11.0], [-11.0, 0.0], [None, None]]
    assert "vs plain [95 %]" in run("show")
    assert "vs " not in run("show", "--baseline", "none")


def test_csv_has_all_numbers_and_stdout_nothing_else(run):
    output = run(
        "compare", "--limit", "20", "--tasks", "2", "--epochs", "1", "--methods", "plain,ewc", "--format", "csv"
    )
    rows = list(csv.DictReader(io.StringIO(output)))
    assert [row["method"] for row in rows] == ["plain", "ewc"]
    expected = {row.setting.method: row.metrics for row in summarize(Store("mooring.sqlite").results())}
    for row in rows:
        assert float(row["accuracy mean"]) == pytest.approx(expected[row["method"]]["accuracy"].mean)
        assert float(row["forgetting std"]) == pytest.approx(expected[row["method"]]["forgetting"].std)
    assert rows[0]["strength"] == ""


TWO_TASKS = ["--limit", "20", "--tasks", "2", "--epochs", "1", "--seeds", "1"]
FORMULAS = [
    "average accuracy: mean over k of a[T, k]",
    "forgetting (T-1): mean over k < T of max over k <= i < T of a[i, k], minus a[T, k]",
    "forgetting (T): mean over k of max over i >= k of a[i, k], minus a[T, k]",
    "learning accuracy: mean over k of a[k, k]",
    "a[i, k]: accuracy on task k after task i of T, %",
]


def test_pasted_tables_are_followed_by_the_formulas_of_their_metrics(run):
    run("compare", *TWO_TASKS, "--stream", "digits,digits-permuted", "--methods", "plain")
    *_, blank, paragraph = (markdown := run("show", "--format", "markdown")).splitlines()
    assert (blank, paragraph) == ("", "; ".join(FORMULAS) + ".")
    assert run("show", "--format", "latex").splitlines()[-5:] == [f"% {formula}" for formula in FORMULAS]
    assert "mean over" not in run("show", "--format", "csv")
    tables = [block for block in markdown.split("\n\n") if block.startswith("| ")]
    assert [len(table.splitlines()) for table in tables] == [3, 3]  # a line after a table would be part of it


@pytest.mark.parametrize("form", ["table", "markdown", "latex"])
def test_frontier_has_the_metrics_of_compare_and_defines_what_it_shows(run, form):
    command = ["frontier", *TWO_TASKS, "--search-seeds", "1", "--methods", "plain,wise-ft"]
    command += ["--strength", "wise-ft=0.2,0.5", "--format", form]
    output = run(*command)
    shown = output.replace(r"\%", "%")
    for title in ("average accuracy %", "forgetting (T)", "learning accuracy %"):
        assert title in shown
    formulas = [formula for formula in FORMULAS if "(T-1)" not in formula]
    assert all(formula.partition(": ")[2] in output for formula in formulas)
    assert "the same over" not in output  # as another metric, which is not shown
    for word in ("chosen", "good", "area"):
        assert f"{word}: " in output
    assert "nan" not in output  # one seed has no interval


def test_json_of_a_frontier_defines_its_metrics(run):
    content = json.loads(run("frontier", *TWO_TASKS, "--methods", "plain", "--json"))
    assert content["metrics"]["forgetting"].startswith("forgetting (T): ")


def test_csv_names_the_scenario_and_every_setting_of_each_row(run):
    specs = [RunSpec("digits", str(number), "ewc", 0, buffers=buffers) for number, buffers in enumerate(BUFFERS)]
    scenarios = ["task", "class"]
    Store("mix.sqlite").add(
        [
            Result(spec, "finished", "", [10.0], [[90.0]], scenario=scenario)
            for spec, scenario in zip(specs, scenarios, strict=True)
        ]
    )
    rows = list(csv.DictReader(io.StringIO(run("show", "mix.sqlite", "--format", "csv"))))
    assert [(row["stream"], row["scenario"], row["buffers"]) for row in rows] == [
        ("digits", scenario, buffers) for scenario, buffers in zip(scenarios, BUFFERS, strict=True)
    ]
    assert "seed" not in rows[0]


def test_csv_of_a_frontier_marks_the_chosen_strength(run):
    command = ["frontier", *TWO_TASKS, "--search-seeds", "1", "--methods", "plain,wise-ft"]
    command += ["--strength", "wise-ft=0.2,0.5"]
    rows = list(csv.DictReader(io.StringIO(run(*command, "--format", "csv"))))
    (frontier,) = json.loads(run(*command, "--json"))["frontiers"]
    best = {entry["method"]: entry["best"]["strength"] for entry in frontier["methods"]}
    assert {row["scenario"] for row in rows} == {"task"}
    chosen = {row["method"]: row["strength"] for row in rows if row["chosen"] == "True"}
    assert chosen == {"plain": "", "wise-ft": str(best["wise-ft"])}
    assert [row["chosen"] for row in rows].count("False") == 1
    for entry in frontier["methods"]:
        assert [row["strength"] for row in entry["dial"] if row["chosen"]] == [best[entry["method"]]]


def test_formats_that_do_not_exist_are_refused_before_anything_is_trained(run, capsys, tmp_path):
    for options, line in (
        (["--format", "word"], "error: unknown format 'word'; allowed: table, markdown, latex, csv, json\n"),
        (["--format", "csv", "--json"], "error: --json and --format csv were both given: leave one of them out\n"),
    ):
        for command in ("compare", "frontier", "tune"):
            assert main([command, "--methods", "plain", *options]) == 2
            assert capsys.readouterr().err == line
    assert list(tmp_path.iterdir()) == []
