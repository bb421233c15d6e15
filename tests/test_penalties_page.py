"""The page about matched penalties and outputs: its figures are those of the measured results beside it."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "penalties-and-outputs.md").read_text()
RESULTS = json.loads((ROOT / "docs" / "figures" / "penalties-and-outputs.json").read_text())
STREAMS = ("two at a time", "five permutations", "five rotations")
"""The columns of the table, as the results name the streams."""


def best(method: str, stream: str) -> dict:
    """Return the best setting that finished with every seed."""
    finished = [row for row in RESULTS[stream][method] if row["finished"] == row["seeds"]]
    return max(finished, key=lambda row: row["accuracy"])


@pytest.mark.parametrize(
    "method", ["summed-ewc", "clamped-summed-ewc", "laplace-kronecker", "clamped-laplace-kronecker"]
)
def test_row_of_a_matched_penalty_has_the_best_of_its_results(method):
    rows = [best(method, stream) for stream in STREAMS]
    cells = " | ".join(f"{row['accuracy']:.1f} ± {row['std']:.1f}" for row in rows)
    assert f"| {cells} |" in PAGE


@pytest.mark.parametrize("method", ["lwf", "der++", "laplace-kronecker", "summed-ewc"])
def test_text_names_the_accuracy_of_each_stream(method):
    for stream in STREAMS:
        assert f"{best(method, stream)['accuracy']:.1f}" in PAGE, stream


def test_what_the_page_says_of_the_order_of_methods_holds():
    for stream in STREAMS:
        accuracy = {method: best(method, stream)["accuracy"] for method in RESULTS[stream]}
        assert accuracy["laplace-kronecker"] > accuracy["summed-ewc"] or stream == "two at a time"
        assert accuracy["der++"] > accuracy["er"]
    assert best("der++", "five permutations")["accuracy"] > best("budget-kronecker", "five permutations")["accuracy"]
    assert best("der++", "two at a time")["accuracy"] < best("budget-kronecker", "two at a time")["accuracy"]
