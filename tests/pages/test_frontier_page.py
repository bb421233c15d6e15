"""docs/frontier.md and the pages with its numbers: their tables are written here from what was stored."""

import json
import re

import pytest

from mooring_lab.methods import find_method
from pages.stored_streams import (
    DOCS,
    MEASURED,
    OURS,
    STREAMS,
    Measured,
    accuracies_of,
    chosen_rows,
    interval,
    method_table,
    number,
    table_line,
)

TEXT = (DOCS / "frontier.md").read_text()
FIFTY = Measured(DOCS / "figures" / "frontier-fifty.json")


def section(heading):
    return re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", TEXT, re.DOTALL | re.MULTILINE)[1]


def table_rows(text):
    lines = re.findall(r"^\| (`.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in line.split(" |")] for line in lines]


def keeps_data(method):
    return find_method(method).memory is not None or find_method(method).all_tasks


def accuracy_table(keeping):
    """Return the table of accuracy on the three streams, of methods that keep data or of those that keep none."""
    names = [name for name in MEASURED["digits"].methods if keeps_data(name) == keeping]
    names.sort(key=lambda name: -sum(accuracies_of(name)))
    lines = [f"| method | {' | '.join(STREAMS.values())} | strengths |", "| --- | --- | --- | --- | --- |"]
    for name in names:
        chosen = chosen_rows(name)
        strengths = "" if chosen[0].strength is None else ", ".join(number(row.strength) for row in chosen)
        lines.append(table_line([f"`{name}`", *(row.cell for row in chosen), strengths]))
    return "\n".join(lines)


PEERS = (
    "clamped-laplace-kronecker",
    "owm",
    "laplace-kronecker",
    "gpm",
    "budget-measured",
    "budget-distil",
    "der++",
    "er",
)
"""The methods that come closest to `budget-kronecker`; the last four keep data."""


def peers_table():
    """Return the table of paired differences of accuracy between the closest methods and `budget-kronecker`."""
    lines = [f"| method | {' | '.join(STREAMS.values())} |", "| --- | --- | --- | --- |"]
    for peer in PEERS:
        lines.append(table_line([f"`{peer}`", *(interval(stream.lead(peer, OURS)) for stream in MEASURED.values())]))
    return "\n".join(lines)


ONE_SETTING = {
    "explicit-ewc": "explicit-ewc",
    "explicit-mas": "soft-mas 1",
    "explicit-si": "soft-si 1",
    "explicit-rwalk": "soft-rwalk 1",
    "frozen-after-first": "frozen-after-first",
    "proximal-ewc 1000": "proximal-ewc 1000",
    "proximal-ewc 1e5": "proximal-ewc 1e5",
    "budget-ewc 0.0001": "budget-ewc 0.0001",
    "budget-kronecker 0.0001": "budget-kronecker 0.0001",
    "budget-kronecker 0.0003": "budget-kronecker 0.0003",
    "budget-kronecker 0.001": "budget-kronecker 0.001",
}
"""The rows of the table of one setting for all streams, as they were stored; a stiffness of 1 is explicit."""


def one_setting():
    """Return the accuracies of the table of one setting, by setting and column; the page has them."""
    columns = (*STREAMS, "fifty", "scratch")
    rows = table_rows(section("One setting for all streams"))
    return {
        name.strip("`"): {column: float(cell) for column, cell in zip(columns, cells, strict=True) if cell}
        for name, *cells in rows
    }


@pytest.mark.parametrize(
    ("name", "heading"),
    [
        ("digits", "Ten digits, two at a time"),
        ("permutations", "Five permutations"),
        ("rotations", "Five rotations"),
    ],
)
def test_settings_on_the_frontier_are_those_that_were_stored(name, heading):
    (printed,) = re.findall(r"^On the frontier: (.*?)\.$", section(heading), re.DOTALL | re.MULTILINE)
    assert re.findall(r"`(.+?)`", printed) == MEASURED[name].frontier


@pytest.mark.parametrize("keeping", [False, True])
def test_table_of_accuracy_is_what_was_stored(keeping):
    assert accuracy_table(keeping) in TEXT


def test_table_of_peers_is_what_was_stored():
    assert peers_table() in TEXT


def test_table_of_fifty_permutations_is_what_was_stored():
    assert method_table(FIFTY.methods) in section("Fifty permutations")
    assert (FIFTY.stored["seeds"], FIFTY.stored["search_seeds"]) == ([0, 1, 2], [3, 4])


def test_table_of_one_setting_has_the_stored_accuracies():
    rows = one_setting()
    assert list(rows) == list(ONE_SETTING)
    for setting, stored in ONE_SETTING.items():
        assert {name: rows[setting][name] for name in STREAMS} == {
            name: round(MEASURED[name].at(stored), 1) for name in STREAMS
        }


def test_table_of_one_setting_has_the_stored_accuracies_of_fifty_permutations():
    stored = json.loads((DOCS / "figures" / "frontier-one-setting.json").read_text())
    accuracy = {(row["method"], row["strength"]): row["metrics"]["accuracy"]["mean"] for row in stored}
    rows = one_setting()
    assert len(accuracy) == len(rows)
    for setting, cells in rows.items():
        method, _, strength = setting.partition(" ")
        assert cells["fifty"] == round(accuracy[method, float(strength) if strength else None], 1)


@pytest.mark.parametrize("name", STREAMS)
def test_stored_numbers_were_scored_with_other_seeds_than_those_that_chose(name):
    stored = MEASURED[name].stored
    assert stored["seeds"] == [0, 1, 2, 3, 4]
    assert stored["search_seeds"] == [5, 6]
    assert set(stored["search_seeds"]).isdisjoint(stored["seeds"])


WORDS = {
    "plain": "plain",
    "frozen-after-first": "frozen after the first task",
    "ewc": "EWC penalty, running average",
    "summed-ewc": "EWC penalty with the same F (`summed-ewc`)",
    "uniform": "uniform penalty",
    "explicit-ewc": "explicit EWC",
    "soft-si": "explicit SI with a stiffness",
    "proximal-ewc": "proximal EWC",
    "budget-ewc": "budget, diagonal",
    "laplace-kronecker": "penalty, Kronecker (`laplace-kronecker`)",
    "clamped-laplace-kronecker": "the same, eigenvalues capped",
    OURS: "budget, Kronecker",
    "owm": "projection of the inputs (`owm`)",
    "er": "replay of 500 samples (er)",
    "der++": "replay of 500 samples with outputs (der++)",
    "joint": "joint training",
}
"""The rows of the table in docs/estimated-budgets.md."""


@pytest.mark.parametrize("method", WORDS)
def test_row_of_the_page_of_budgets_is_what_was_stored(method):
    line = table_line([WORDS[method], *(row.cell for row in chosen_rows(method))])
    assert line in (DOCS / "estimated-budgets.md").read_text().replace("**", "")


CHOICES = {
    f"{OURS} 0.0003": f"(`{OURS}`)",
    "proximal-ewc 1e5": "(`proximal-ewc`)",
    "explicit-ewc": "(`explicit-ewc`)",
    "plain": "| plain fine-tuning, to compare |",
}
"""The rows of the table of many tasks in docs/choose.md that are in the stored numbers, and how they begin."""


@pytest.mark.parametrize("setting", CHOICES)
def test_row_of_the_page_of_choices_is_what_was_stored(setting):
    cells = " | ".join(f"{MEASURED[name].at(setting):.1f}" for name in STREAMS)
    assert f"{CHOICES[setting]} | {cells} |" in (DOCS / "choose.md").read_text()


def test_page_of_choices_has_the_chosen_budgets_of_distillation():
    chosen = chosen_rows("budget-distil")
    cells = " | ".join(f"{row.accuracy:.1f} at {number(row.strength)} nats" for row in chosen)
    (row,) = (line for line in (DOCS / "choose.md").read_text().splitlines() if "measured as `budget-distil`" in line)
    assert f" | {cells} |" in row


def test_page_of_choices_has_the_accuracy_of_replay_with_outputs():
    cells = " | ".join(f"{accuracy:.1f}" for accuracy in accuracies_of("der++"))
    assert f"`der++`, in `mooring compare` only | {cells} |" in (DOCS / "choose.md").read_text()
