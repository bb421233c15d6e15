"""Every claim of a reproduction, compared with its definition."""

import re
from collections.abc import Iterator

from recomputation import figure_definitions, table_definitions
from recomputation.claim_registry import DEFINITIONS
from recomputation.comparison import Disagreement, printed_numbers, prints_numbers, rounds_to
from recomputation.evidence import Evidence, Recomputed
from recomputation.run_records import Reproduction
from recomputation.table_definitions import AT_BOTH_SETTINGS

REGISTERED = (table_definitions, figure_definitions)
"""The modules that register definitions when they are imported."""

AT_PAPER_SETTINGS = "at the paper's settings"
SCOPE = re.compile(r"(\d+)(?: of (\d+))? pairs? \(")
"""How a definition says over how many of how many pairs a mean is."""


def compare_claims(reproduction: Reproduction) -> tuple[int, list[Disagreement]]:
    """Return how many claims were recomputed, and the disagreements with the target `claims`."""
    count, disagreements = 0, list[Disagreement]()
    for target in ("claims", "stand-in"):
        own, differing = _compare_target(reproduction, target)
        count += own
        disagreements += differing
    return count, disagreements


def _compare_target(reproduction: Reproduction, target: str) -> tuple[int, list[Disagreement]]:
    """Return how many claims of a target were recomputed, and the disagreements."""
    stands_in = target == "stand-in"
    evidence, count, disagreements = Evidence(reproduction, stands_in=stands_in), 0, list[Disagreement]()
    papers = Evidence(reproduction, at_paper_settings=True)
    tables = [table for table in reproduction.findings[target]["tables"] if "claim" in table["columns"]]
    for row in (row for table in tables for row in table["rows"]):
        matches = [(d, m) for pattern, d in DEFINITIONS.items() if (m := re.fullmatch(pattern, row["claim"]))]
        if len(matches) != 1:
            disagreements.append(Disagreement(row["claim"], row["ours"], "not recomputed"))
            continue
        count += 1
        definition, match = matches[0]
        disagreements += _compare_row(row, definition(evidence, *match.groups()))
        if definition in AT_BOTH_SETTINGS and not stands_in:
            disagreements += _compare_at_paper_settings(row, definition(papers, *match.groups()))
        elif row[AT_PAPER_SETTINGS]:
            disagreements.append(Disagreement(row["claim"], row[AT_PAPER_SETTINGS], "our settings do not matter"))
    return count, disagreements


def _compare_at_paper_settings(row: dict[str, str], expected: Recomputed) -> Iterator[Disagreement]:
    """Yield what the column of the paper's settings has and should not; it is empty if there is nothing to compare."""
    text, _, verdict = row[AT_PAPER_SETTINGS].rpartition(": ")
    numbers = text.partition(";")[0] if expected.scopes else text
    if not any(expected.seeds):
        if row[AT_PAPER_SETTINGS]:
            yield Disagreement(f"{row['claim']} {AT_PAPER_SETTINGS}", row[AT_PAPER_SETTINGS], "nothing to compare")
    elif verdict != expected.verdict or not prints_numbers(numbers, expected.numbers):
        written = row[AT_PAPER_SETTINGS]
        yield Disagreement(f"{row['claim']} {AT_PAPER_SETTINGS}", written, [*expected.numbers, expected.verdict])


def _compare_row(row: dict[str, str], expected: Recomputed) -> Iterator[Disagreement]:
    """Yield what a claim's row has and should not."""
    statement, ours = row["claim"], row["ours"]
    # The pairs that a mean leaves out, and what belongs to other settings, follow the first semicolon of a difference.
    numbers = ours.partition(";")[0] if expected.scopes else ours
    if not prints_numbers(numbers, expected.numbers) or not all(word in ours for word in expected.words):
        yield Disagreement(f"{statement} ours", ours, [*expected.numbers, *expected.words])
    if expected.details and not prints_numbers(ours.rpartition("; ")[2], expected.details):
        yield Disagreement(f"{statement} details", ours, list(expected.details))
    if row["verdict"] != expected.verdict:
        yield Disagreement(f"{statement} verdict", row["verdict"], expected.verdict)
    if expected.papers is not None:
        printed = printed_numbers(row["paper's"])[: len(expected.papers)]
        too_few = len(printed) < len(expected.papers) or (not expected.papers and "by its tables" in row["paper's"])
        if too_few or not all(map(rounds_to, expected.papers, printed)):
            yield Disagreement(f"{statement} paper's", row["paper's"], list(expected.papers))
    scopes = [(int(a), int(b or a)) for a, b in SCOPE.findall(row["holds when"])]
    if scopes != list(expected.scopes):
        yield Disagreement(f"{statement} holds when", row["holds when"], list(expected.scopes))
    seeds = list(dict.fromkeys([min(expected.seeds, default=0), max(expected.seeds, default=0)]))
    if list(map(int, printed_numbers(row["seeds"]))) != [count for count in seeds if count]:
        yield Disagreement(f"{statement} seeds", row["seeds"], list(expected.seeds))
