"""docs/penalties-and-outputs.md: its table and sentences are written here from the stored numbers.

The three streams are those of the frontier's page. What that page does not have is in penalties-and-outputs.json, as
`mooring frontier --json` and `mooring compare --json` print it.
"""

import json
import re

import pytest

from pages.test_frontier_page import DOCS, FIFTY, MEASURED, OURS, STREAMS, accuracies_of, listed, number

TEXT = re.sub(r"\s+", " ", (DOCS / "penalties-and-outputs.md").read_text())
EXTRA = json.loads((DOCS / "figures" / "penalties-and-outputs.json").read_text())
PULLS = {
    "ewc": "running average, averaged over tasks | penalty (`ewc`)",
    "summed-ewc": "Fisher diagonal, summed over tasks | penalty (`summed-ewc`)",
    "clamped-summed-ewc": "| clamped penalty",
    "proximal-ewc": "| proximal step (`proximal-ewc`)",
    "budget-ewc": "| budget (`budget-ewc`)",
    "laplace-kronecker": "Kronecker factors, summed over tasks | penalty (`laplace-kronecker`)",
    "clamped-laplace-kronecker": "| clamped penalty",
    OURS: "| budget (`budget-kronecker`)",
}
"""The rows of the table of pulls."""
OTHERS = ("summed-ewc", "clamped-summed-ewc", "laplace-kronecker", "lwf")
"""The methods of the page that are nowhere surely ahead of `budget-kronecker`."""


def leads(method, other):
    return [MEASURED[name].lead(method, other) for name in STREAMS]


def interval(lead, digits=1):
    return f"[{lead.low:+.{digits}f}, {lead.high:+.{digits}f}]"


def means(differences):
    return listed([f"{lead.mean:.1f}" for lead in differences])


def finished(method, stream):
    """Return the strengths that finished with every seed, and those that no seed finished."""
    dial = MEASURED[stream].by_name[method]["dial"]
    seeds = len(MEASURED[stream].stored["seeds"])
    return (
        [row["strength"] for row in dial if not row["verdict"]],
        [row["strength"] for row in dial if row["verdict"] == f"unstable in {seeds} of {seeds}"],
    )


def memory(samples):
    """Return the accuracy of `der++` with this number of samples, at the strength that was chosen for it."""
    stored = EXTRA["memory"][str(samples)]
    assert set(stored["search_seeds"]).isdisjoint(stored["seeds"])
    (sweep,) = stored["methods"]
    assert sweep["best"]["memory"] == samples
    return sweep["best"]["metrics"]["accuracy"]["mean"]


def without_outputs():
    return [EXTRA["without outputs"][name]["metrics"]["accuracy"]["mean"] for name in ("permutations", "rotations")]


def table_of_pulls():
    rows = []
    for method, words in PULLS.items():
        chosen = [MEASURED[name].methods[method] for name in STREAMS]
        cells = " | ".join(f"{row.accuracy:.1f} ± {row.std:.1f}" for row in chosen)
        rows.append(f"| {words} | {cells} |")
    return " ".join(rows)


def importance_of_ewc():
    first, *others = leads("proximal-ewc", "summed-ewc")
    differences = [f"{lead.mean:+.1f} {interval(lead)}" for lead in (first, *others)]
    return (
        f"With the summed mean Fisher information the penalty gains {means(leads('summed-ewc', 'ewc'))} points. "
        f"The proximal step is then at {listed(differences)} points from it, seed by seed."
    )


def strengths_that_explode():
    last = [number(max(finished("summed-ewc", name)[0])) for name in STREAMS]
    first = [number(min(finished("summed-ewc", name)[1])) for name in STREAMS]
    for method in ("proximal-ewc", "clamped-summed-ewc", "clamped-laplace-kronecker"):
        assert all(len(finished(method, name)[0]) == len(MEASURED[name].by_name[method]["dial"]) for name in STREAMS)
    assert MEASURED["digits"].width("proximal-ewc") == pytest.approx(3)
    return (
        f"`summed-ewc` finishes with every seed up to {listed(last)} on the three streams, and explodes with every "
        f"seed at {listed(first)}. `proximal-ewc` finishes at every strength, and on the first stream it is within 2 "
        "points of its chosen strength over three decades."
    )


def curvature():
    first, *others = leads("laplace-kronecker", "summed-ewc")
    assert first.low < 0 < first.high
    two, permuted, rotated = leads("clamped-laplace-kronecker", OURS)
    assert permuted.low > 0
    assert all(lead.low < 0 < lead.high for lead in (two, rotated))
    differences = [f"{lead.mean:+.1f} {interval(lead)}" for lead in (two, permuted, rotated)]
    return (
        f"and {means(others)} points better on the others. With the cap the same penalty is at {listed(differences)} "
        f"points from `{OURS}`: ahead on permutations, and not surely behind on the other two."
    )


def when_to_use_lwf():
    first, *others = accuracies_of("lwf")
    return (
        f"every task has its own head: {first:.1f} % two at a time. Not where inputs change: it has "
        f"{others[0]:.1f} % on permutations and {others[1]:.1f} % on rotations."
    )


def miniature_of_laplace():
    factors, diagonal, joint = (accuracies_of(name)[1] for name in ("laplace-kronecker", "summed-ewc", "joint"))
    return (
        f"Five permutations: {factors:.1f} % with factors, {diagonal:.1f} % with the diagonal, {joint:.1f} % for joint "
        "training."
    )


def miniature_of_lwf():
    (lwf, *others), (plain, *plain_others) = accuracies_of("lwf"), accuracies_of("plain")
    lead, *_ = leads("lwf", "plain")
    return (
        f"Two at a time {lwf:.1f} %, plain {plain:.1f} % ({lead.mean:+.1f} {interval(lead)}). With one head "
        f"{others[0]:.1f} and {others[1]:.1f} %, plain {plain_others[0]:.1f} and {plain_others[1]:.1f} %."
    )


def miniature_of_der():
    (two, permuted, rotated), (er_two, er_permuted, er_rotated) = accuracies_of("der++"), accuracies_of("er")
    first, second, third = (f"({lead.mean:+.1f} {interval(lead)})" for lead in leads("der++", "er"))
    return (
        f"Permutations {permuted:.1f} %, replay {er_permuted:.1f} % {second}; rotations {rotated:.1f} and "
        f"{er_rotated:.1f} % {third}; two at a time {two:.1f} and {er_two:.1f} % {first}."
    )


def fifty_permutations():
    low, high = (FIFTY.at(f"laplace-kronecker {strength}") for strength in (0.3, 1))
    exploded, ours = EXTRA["fifty permutations"], FIFTY.methods[OURS]
    assert (exploded["strength"], exploded["verdict"]) == (3.0, "unstable in 3 of 3")
    assert FIFTY.methods["laplace-kronecker"].strength == 1
    return (
        f"`laplace-kronecker` has {low:.1f} % there at 0.3 and {high:.1f} % at 1, its chosen strength, and explodes "
        "with every seed at 3. The curvature is summed over tasks, so the strength at which it explodes falls with "
        f"each task. `{OURS}` has {ours.accuracy:.1f} % at {number(ours.strength)}."
    )


def der_without_outputs():
    (first, second), (_, er_first, er_second) = without_outputs(), accuracies_of("er")
    return (
        f"has {first:.1f} and {second:.1f} % on permutations and rotations, and experience replay "
        f"{er_first:.1f} and {er_second:.1f} %."
    )


def against_ours():
    two, permuted, rotated = leads("der++", OURS)
    capped = leads("clamped-laplace-kronecker", OURS)
    assert permuted.low > 0 > two.high
    assert rotated.low < 0 < rotated.mean
    assert [lead.low > 0 for lead in capped] == [False, True, False]
    others = [lead for method in OTHERS for lead in leads(method, OURS)]
    assert all(lead.low < 0 for lead in others)
    return (
        f"`der++` does on permutations, by {permuted.mean:.1f} points {interval(permuted)}. On rotations it is "
        f"{rotated.mean:.1f} points ahead {interval(rotated)}, and two at a time {-two.mean:.1f} behind "
        f"{interval(two)}. `clamped-laplace-kronecker`, with the same curvature, does on permutations, by "
        f"{capped[1].mean:.1f} points {interval(capped[1])}, and is not surely behind on the others. No other method "
        "here is ahead on any of them, with an interval that excludes 0."
    )


def number_of_samples():
    ours, all_samples = accuracies_of(OURS)[1], accuracies_of("der++")[1]
    fewer = [memory(samples) for samples in (50, 100, 200)]
    assert max(fewer) < ours < all_samples
    return (
        f"with 50, 100 and 200 of them `der++` has {listed([f'{value:.1f}' for value in fewer])} % on permutations, "
        f"less than the budget without any, and with 500 it has {all_samples:.1f} %."
    )


SENTENCES = [
    table_of_pulls,
    importance_of_ewc,
    strengths_that_explode,
    curvature,
    when_to_use_lwf,
    miniature_of_laplace,
    miniature_of_lwf,
    miniature_of_der,
    fifty_permutations,
    der_without_outputs,
    against_ours,
    number_of_samples,
]


@pytest.mark.parametrize("write", SENTENCES, ids=lambda write: write.__name__)
def test_sentence_of_the_page_is_what_the_numbers_say(write):
    assert write() in TEXT


def test_der_is_ahead_of_replay_on_every_stream():
    assert all(lead.mean > 0 for lead in leads("der++", "er"))


def test_choosing_a_method_quotes_the_accuracy_of_der():
    cells = " | ".join(f"{accuracy:.1f}" for accuracy in accuracies_of("der++"))
    assert f"`der++`, in `mooring compare` only | {cells} |" in (DOCS / "choose.md").read_text()
