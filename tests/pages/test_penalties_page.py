"""docs/penalties-and-outputs.md: its tables have the accuracies that were stored."""

import re

import pytest

from pages.stored_streams import DOCS, MEASURED, OURS, accuracies_of, chosen_rows, interval

PAGE = (DOCS / "penalties-and-outputs.md").read_text()
PULLS = {
    "ewc": "| running average, averaged over tasks | penalty (`ewc`)",
    "summed-ewc": "| Fisher diagonal, summed over tasks | penalty (`summed-ewc`)",
    "clamped-summed-ewc": "| | clamped penalty",
    "proximal-ewc": "| | proximal step (`proximal-ewc`)",
    "budget-ewc": "| | budget (`budget-ewc`)",
    "laplace-kronecker": "| Kronecker factors, summed over tasks | penalty (`laplace-kronecker`)",
    "clamped-laplace-kronecker": "| | clamped penalty",
    OURS: "| | budget (`budget-kronecker`)",
}
"""The rows of the table of pulls, in order."""


def test_table_of_pulls_is_what_was_stored():
    rows = [f"{words} | {' | '.join(row.cell for row in chosen_rows(method))} |" for method, words in PULLS.items()]
    assert "\n".join(rows) in PAGE


@pytest.mark.parametrize(("method", "other"), [("lwf", "plain"), ("der++", "er"), ("laplace-kronecker", "summed-ewc")])
def test_row_of_the_methods_in_miniature_has_the_stored_accuracies(method, other):
    (row,) = re.findall(rf"^\| `{re.escape(method)}` \| .* \| (.*) \|$", PAGE, re.MULTILINE)
    streams = ("permutations",) if method == "laplace-kronecker" else MEASURED
    shown = re.findall(r"(?<![-+.\d])\d+\.\d(?!\d)", row)
    for name in (method, other):
        expected = [f"{MEASURED[stream].methods[name].accuracy:.1f}" for stream in streams]
        assert set(expected) <= set(shown), (name, expected)
    leads = [interval(stream.lead(method, other)) for stream in MEASURED.values()]
    assert set(re.findall(r"\((.+? \[.+?\])\)", row)) <= set(leads)


def test_der_is_ahead_of_replay_on_every_stream():
    assert all(ahead > behind for ahead, behind in zip(accuracies_of("der++"), accuracies_of("er"), strict=True))
