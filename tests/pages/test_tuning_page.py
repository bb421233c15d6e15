"""docs/tuning.md: the default strengths on the digits are those that its search chose."""

import re
from pathlib import Path

import pytest

from mooring_lab import Study, tune
from mooring_lab.methods.strengths import DIGITS_STRENGTHS

PAGE = Path(__file__).parents[2] / "docs" / "tuning.md"
CHOSEN_BY_HAND = {"proximal-ewc": 1e4}
"""Where a plateau of strengths begins, as the page says."""


def chosen():
    """Return the strengths that the printed search chose, by method."""
    table = re.search(r"^searched digits.*?(?=^digits)", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
    return {method: float(strength) for method, strength in re.findall(r"^(\S+) +0\.03 +(\S+) ", table, re.MULTILINE)}


def test_defaults_are_the_strengths_of_the_printed_search():
    strengths = chosen()
    assert {"ewc", "mas", "si", "rwalk", "uniform", "random", "l2-sp", "proximal-ewc"} == set(strengths)
    assert {name: DIGITS_STRENGTHS[name] for name in strengths} == strengths | CHOSEN_BY_HAND


@pytest.mark.faults  # slow
def test_search_finds_the_default_strength_of_l2_sp(tmp_path):
    arguments = {"stream": "digits", "methods": "l2-sp", "seeds": 1, "search_seeds": 5}
    tuned = tune(Study(tmp_path / "digits.sqlite"), lrs=[0.03], strengths=[0.1, 3.0, 10.0, 30.0, 100.0], **arguments)
    assert tuned.choices[0].best.setting.strength == DIGITS_STRENGTHS["l2-sp"] == chosen()["l2-sp"]
