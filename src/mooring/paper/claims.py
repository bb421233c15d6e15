"""Every claim of the paper, decided by our runs, in one table."""

from collections.abc import Sequence

from mooring.lab.summary import Row
from mooring.paper import claims_of_figures
from mooring.paper.claim import Claim, decided, gain, told
from mooring.paper.finding import Finding, Table
from mooring.paper.laboratory import Laboratory
from mooring.paper.scale import EXPLICIT, REGULARIZERS, REPLAY, ROWS, Case, Scale
from mooring.paper.tables import rows_at_our_settings

__all__ = ["count", "run"]

Rows = dict[Case, list[Row]]


def count(scale: Scale) -> int:
    """None of its own: it reads the runs of the tables and figures."""
    return 0


def run(lab: Laboratory) -> Finding:
    """Decide every claim."""
    main = rows_at_our_settings(lab, lab.scale.cases(), ROWS)
    rest = [name for name in ROWS if name not in REPLAY]
    other = rows_at_our_settings(lab, lab.scale.other_cases(), rest)
    claims = [
        *_explicit_beats_penalty(main, f"with {lab.scale.network}", accuracy="6.2", forgetting="4.5"),
        *(claim for data in lab.scale.streams for claim in _on_one(main, data)),
        *_against_replay(main),
        *_explicit_beats_penalty(other, f"with {lab.scale.other}"),
        *claims_of_figures.claims(lab),
    ]
    rows = [claim.to_row() for claim in claims]
    held = {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in ("holds", "does not hold")}
    open_ = len(claims) - sum(held.values())
    text = [
        f"Of {len(claims)} claims {held['holds']} hold, {held['does not hold']} do not, and {open_} are not decided: "
        "the 95 % interval over seeds holds 0, or too few seeds finished."
    ]
    results = [result for rows_ in (*main.values(), *other.values()) for row in rows_ for result in row.results]
    return Finding("claims", text, [Table("Claims", list(rows[0]), rows)], results)


def _explicit_beats_penalty(rows: Rows, where: str, accuracy: str = "", forgetting: str = "") -> list[Claim]:
    """The explicit step against the penalty of the same importance."""
    pairs = [pair for some in rows.values() for pair in _pairs(some, EXPLICIT, REGULARIZERS)]
    what = f"{len(pairs)} pairs of explicit step and penalty {where}"
    better, kept = gain(pairs, "accuracy"), gain([(b, a) for a, b in pairs], "forgetting")
    return [
        Claim(
            f"The explicit step is more accurate than its penalty {where}.",
            f"mean difference in accuracy over {what} > 0",
            told(better),
            accuracy,
            decided(better),
        ),
        Claim(
            f"The explicit step forgets less than its penalty {where}.",
            f"mean difference in forgetting over {what} > 0",
            told(kept),
            forgetting,
            decided(kept),
        ),
    ]


def _on_one(rows: Rows, data: str) -> list[Claim]:
    return _explicit_beats_penalty({case: some for case, some in rows.items() if case.data == data}, f"on {data}")


def _against_replay(rows: Rows) -> list[Claim]:
    """The explicit step against replay, which keeps old data."""
    pairs = []
    for some in rows.values():
        found = {row.setting.method: row for row in some}
        pairs += [(found[a], found[b]) for a in EXPLICIT for b in REPLAY if a in found and b in found]
    less, accurate = gain([(b, a) for a, b in pairs], "forgetting"), gain([(b, a) for a, b in pairs], "accuracy")
    return [
        Claim(
            "The explicit step forgets less than replay.",
            f"mean difference in forgetting over {len(pairs)} pairs with a-gem and er > 0",
            told(less),
            "",
            decided(less),
        ),
        Claim(
            "Replay is more accurate than the explicit step.",
            f"mean difference in accuracy over {len(pairs)} pairs with a-gem and er > 0",
            told(accurate),
            "",
            decided(accurate),
        ),
    ]


def _pairs(rows: Sequence[Row], first: Sequence[str], second: Sequence[str]) -> list[tuple[Row, Row]]:
    found = {row.setting.method: row for row in rows}
    return [(found[a], found[b]) for a, b in zip(first, second, strict=True) if a in found and b in found]
