"""Claims about pairs of methods under the same condition: their mean difference, some pair or every pair."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mooring_lab.model.metrics import Interval
from mooring_lab.model.plurals import pluralize
from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row
from mooring_paper.claims.claim import Claim, SeedRequest, describe_conditions, list_names
from mooring_paper.claims.sequential_verdict import Decision, LookSchedule, Verdict, decide
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.scale import Condition
from mooring_paper.context.seed_statistics import format_difference, summarize_seeds
from mooring_paper.context.target_result import CELL_METRICS
from mooring_paper.published.published_numbers import published

MetricOfRun = str | Callable[[Result], float]
"""A name of `Result.metrics`, or a function that computes a metric of a run."""

MethodRows = Mapping[Condition, Mapping[str, Row]]
"""Rows by condition and method."""


@dataclass(frozen=True)
class MethodPair:
    """Two methods under the same condition.

    Attributes:
        condition: network, regime and data set.
        methods: their names.
        rows: their runs; None if one of them has none, because no setting of it finished the search.
    """

    condition: Condition
    methods: tuple[str, str]
    rows: tuple[Row, Row] | None

    def __str__(self) -> str:
        return f"{self.methods[0]} against {self.methods[1]} on {self.condition.data} in {self.condition.regime.name}"

    def is_finished(self, seeds: int) -> bool:
        """Return whether all of the first seeds finished with both methods."""
        return self.rows is not None and all(r.status == "finished" for row in self.rows for r in _first(row, seeds))

    def papers(self, metric: MetricOfRun) -> float | None:
        """Return the difference between the two methods in the paper's tables; None if it has none."""
        first, second = (published(*self.condition.where, method) for method in self.methods)
        if first is None or second is None or metric not in CELL_METRICS:
            return None
        difference: float = getattr(first, metric) - getattr(second, metric)
        return difference


@dataclass(frozen=True)
class PairsDecision:
    """The verdict on the mean difference over pairs.

    Attributes:
        decision: the verdict.
        used: the pairs in which every run finished, over which the mean is taken; those of `minus` apart.
        minus: the pairs whose mean is subtracted.
        wanted: the rows that need more seeds for the next look.
    """

    decision: Decision
    used: tuple[MethodPair, ...]
    minus: tuple[MethodPair, ...]
    wanted: tuple[SeedRequest, ...]

    @property
    def seeds(self) -> int:
        """How many seeds were used."""
        return 0 if self.decision.difference is None else self.decision.difference.count

    def papers_mean(self, metric: MetricOfRun) -> float | None:
        """Return the paper's mean over the same pairs; None if it lacks one of them."""
        values, subtracted = ([pair.papers(metric) for pair in group] for group in (self.used, self.minus))
        known, others = ([value for value in group if value is not None] for group in (values, subtracted))
        if not known or len(known) + len(others) < len(values) + len(subtracted):
            return None
        return math.fsum(known) / len(known) - (math.fsum(others) / len(others) if others else 0.0)


def decide_pairs(
    pairs: Sequence[MethodPair],
    metric: MetricOfRun,
    looks: LookSchedule,
    low: float = 0.0,
    high: float = math.inf,
    *,
    second_metric: MetricOfRun | None = None,
    minus: Sequence[MethodPair] = (),
    comparisons_to_hold: int = 1,
    comparisons_to_fail: int = 1,
) -> PairsDecision:
    """Return whether the mean difference over pairs, first minus second method by seed, lies between bounds.

    A pair is left out if one of its runs did not finish, so that every seed is averaged over the same pairs.

    Args:
        pairs: the pairs.
        metric: the metric to compare.
        looks: the numbers of seeds. The first look takes the seeds that there are.
        low: the lower bound.
        high: the upper bound.
        second_metric: the metric of the second method, if it is another.
        minus: pairs whose mean difference is subtracted.
        comparisons_to_hold: see `decide`.
        comparisons_to_fail: see `decide`.
    """

    def used(group: Sequence[MethodPair], seeds: int) -> tuple[MethodPair, ...]:
        return tuple(pair for pair in group if pair.is_finished(seeds))

    def lacking(seeds: int) -> tuple[SeedRequest, ...]:
        both = (*used(pairs, seeds), *used(minus, seeds))
        rows = {row.setting: row for pair in both for row in pair.rows or ()}
        return tuple((row, seeds) for row in rows.values() if len(row.results) < seeds)

    def sample(seeds: int) -> list[float] | None:
        if seeds > looks.seeds[0] and lacking(seeds):
            return None
        gains, others = (
            _gains_by_seed(used(group, seeds), seeds, metric, second_metric or metric) for group in (pairs, minus)
        )
        if not minus:
            return list(gains.values())
        return [gain - others[seed] for seed, gain in gains.items() if seed in others]

    comparisons = (comparisons_to_hold, comparisons_to_fail)
    decision = decide(sample, looks, low, high, *comparisons)
    wanted = () if decision.next_look is None else lacking(decision.next_look)
    return PairsDecision(decision, used(pairs, decision.look), used(minus, decision.look), wanted)


class Evidence:
    """The runs behind claims, with more seeds for rows that do not decide.

    Args:
        context: the source of the runs.
        looks: the numbers of seeds at which differences are looked at.
    """

    def __init__(self, context: PaperContext, looks: LookSchedule) -> None:
        self.context, self.looks = context, looks
        self._rows: dict[RunSpec, Row] = {}

    def __call__(self, row: Row) -> Row:
        """Return a row with the seeds that were added to it."""
        return self._rows.get(row.setting, row)

    @property
    def results(self) -> list[Result]:
        """All runs of the rows to which seeds were added."""
        return [result for row in self._rows.values() for result in row.results]

    def add(self, requests: Sequence[SeedRequest]) -> None:
        """Train the seeds that rows lack, all rows together.

        Raises:
            MissingRuns: if the context defers training.
        """
        wanted: dict[RunSpec, list[RunSpec]] = {}
        for row, seeds in requests:
            specs = [self.context.with_seed(row.results[0].spec, seed) for seed in range(seeds)]
            wanted[row.setting] = max(specs, wanted.get(row.setting, []), key=len)
        for setting, results in self.context.run_groups(wanted).items():
            (self._rows[setting],) = summarize_seeds(results)

    def rows(self, runs: Mapping[Condition, Iterable[Result]]) -> MethodRows:
        """Return the rows of runs by condition and method, with the seeds that were added to them."""
        return {c: {row.setting.method: self(row) for row in summarize_seeds(group)} for c, group in runs.items()}

    def pairs(self, rows: MethodRows, names: Iterable[tuple[str, str]]) -> "PairGroup":
        """Return pairs of rows with these names under every condition."""
        pairs, names = [], list(names)
        for condition, table in rows.items():
            for first, second in names:
                both = (table[first], table[second]) if {first, second} <= table.keys() else None
                pairs.append(MethodPair(condition, (first, second), both))
        return PairGroup(tuple(pairs), self.looks)

    def row_pairs(self, rows: Iterable[tuple[Condition, Row, Row]]) -> "PairGroup":
        """Return pairs of rows with the seeds that were added to them."""
        pairs = (MethodPair(c, (a.label, b.label), (self(a), self(b))) for c, a, b in rows)
        return PairGroup(tuple(pairs), self.looks)


@dataclass(frozen=True)
class PairGroup:
    """Pairs of methods that claims are about.

    Attributes:
        pairs: the pairs.
        looks: the numbers of seeds at which their differences are looked at.
    """

    pairs: tuple[MethodPair, ...]
    looks: LookSchedule

    @property
    def swapped(self) -> "PairGroup":
        """The same pairs in the other order."""
        swapped = (MethodPair(p.condition, p.methods[::-1], p.rows and p.rows[::-1]) for p in self.pairs)
        return PairGroup(tuple(swapped), self.looks)

    def where(self, field: str, *values: object) -> "PairGroup":
        """Return the pairs under conditions with these values of a field, such as "data"."""
        return PairGroup(tuple(pair for pair in self.pairs if getattr(pair.condition, field) in values), self.looks)

    def mean(
        self,
        statement: str,
        measure: str,
        metric: MetricOfRun,
        *,
        papers: str = "",
        low: float = 0.0,
        high: float = math.inf,
        spec: str = "+.2f",
        second_metric: MetricOfRun | None = None,
        minus: Sequence[MethodPair] = (),
    ) -> Claim:
        """Return a claim that the mean difference over pairs lies between bounds; by default, that it is above 0.

        The paper's number is the mean of its tables over the same pairs, followed by the number in its text.
        """
        pairs = self.pairs
        tested = decide_pairs(pairs, metric, self.looks, low, high, second_metric=second_metric, minus=minus)
        over = f"over {_describe_scope(pairs, tested.used)}"
        over += f", minus that over {_describe_scope(minus, tested.minus)}" if minus else ""
        counts = f"over {len(tested.used)} of {pluralize(len(pairs), 'pair')}"
        counts += f", minus {len(tested.minus)} of {len(minus)}" if minus else ""
        mean = tested.papers_mean(metric)
        same = f"{mean:{spec}} by its tables over the same pairs" if mean is not None else ""
        used = {id(pair) for pair in (*tested.used, *tested.minus)}  # comparing pairs would compare all their runs
        missing = [pair for pair in (*pairs, *minus) if id(pair) not in used]
        return Claim(
            statement,
            f"mean difference in {measure}, is {_describe_bounds(low, high)}; {over}",
            "; ".join([f"{describe_gain(tested.decision.difference, spec)} {counts}", *_unfinished(missing)]),
            ", ".join(part for part in (same, papers) if part),
            tested.decision.verdict,
            (tested.seeds,),
            tested.wanted,
        )

    def in_each(self, statement: str, better: str, metric: str) -> Claim:
        """Return a claim that the first method has more than the second in every pair, and not only on average.

        One pair suffices to refute it, so the interval that refutes is corrected for the number of pairs. A pair with a
        run that did not finish can not confirm it.
        """
        tests = [decide_pairs([p], metric, self.looks, comparisons_to_fail=len(self.pairs)) for p in self.pairs]
        missing = [pair for pair, test in zip(self.pairs, tests, strict=True) if not test.used]
        verdicts = [test.decision.verdict for test in tests]
        verdict: Verdict = "holds" if verdicts and set(verdicts) == {"holds"} else "not decided"
        if "does not hold" in verdicts:
            verdict = "does not hold"
        better_in, worse_in = verdicts.count("holds"), verdicts.count("does not hold")
        known = [value for test in tests for pair in test.used if (value := pair.papers(metric)) is not None]
        return Claim(
            statement,
            f"{better} beyond the interval in each of {_describe_scope(self.pairs)}; refuted by one pair that is worse "
            "beyond its interval, which is corrected for the number of pairs",
            "; ".join([f"better in {better_in} of {len(tests)} pairs, worse in {worse_in}", *_unfinished(missing)]),
            f"in {sum(value > 0 for value in known)} of the same {len(known)} by its tables" if known else "",
            verdict,
            tuple(test.seeds for test in tests if test.used),
            _wanted(tests, verdict, blocked=bool(missing), reachable=lambda difference: difference.mean < 0),
        )

    def in_any(
        self,
        statement: str,
        more: str,
        metric: str,
        *,
        low: float = 0.0,
        papers_pair: MethodPair | None = None,
        papers: str = "",
    ) -> Claim:
        """Return a claim that the first method has at least `low` more than the second in some pair.

        One pair suffices to confirm it, so the interval that confirms is corrected for the number of pairs. The claim
        is refuted only if every pair finished and the paper's own pair is among them.

        Args:
            statement: the claim.
            more: what is compared.
            metric: the metric to compare.
            low: the bound.
            papers_pair: the pair behind the paper's number; None if it has none.
            papers: the paper's number.
        """
        tests = [decide_pairs([p], metric, self.looks, low, comparisons_to_hold=len(self.pairs)) for p in self.pairs]
        missing = [pair for pair, test in zip(self.pairs, tests, strict=True) if not test.used]
        verdicts = [test.decision.verdict for test in tests]
        untrained = papers_pair is not None and str(papers_pair) not in map(str, self.pairs)
        blocked = bool(missing) or untrained
        verdict: Verdict = "does not hold" if not blocked and set(verdicts) == {"does not hold"} else "not decided"
        if "holds" in verdicts:
            verdict = "holds"
        known = [(test.decision.difference, pair) for test in tests for pair in test.used if test.decision.difference]
        largest = max(known, key=lambda difference_and_pair: difference_and_pair[0].mean, default=None)
        parts = ["no pair finished" if largest is None else f"at most {describe_gain(largest[0])}, {largest[1]}"]
        parts += _unfinished(missing)
        parts += [f"the paper's own pair, {papers_pair}, was not trained"] if untrained else []
        return Claim(
            statement,
            f"{more}{f' by {low:g} or more' if low else ''}, beyond an interval corrected for the number of pairs, in "
            f"at least one of {_describe_scope(self.pairs)}; refuted only if all of them and the paper's own pair "
            "finished",
            "; ".join(parts),
            papers,
            verdict,
            tuple(test.seeds for test in tests if test.used),
            _wanted(tests, verdict, blocked=blocked, reachable=lambda difference: difference.mean > low),
        )


def _wanted(
    tests: Sequence[PairsDecision], verdict: Verdict, *, blocked: bool, reachable: Callable[[Interval], bool]
) -> tuple[SeedRequest, ...]:
    """Return the rows of undecided pairs; if one verdict is out of reach, only of pairs that may reach the other."""
    if verdict != "not decided":
        return ()
    tested = [(test, test.decision.difference) for test in tests]
    useful = [test for test, difference in tested if difference and (not blocked or reachable(difference))]
    return tuple(request for test in useful for request in test.wanted)


def _first(row: Row, seeds: int) -> list[Result]:
    return [result for result in row.results if result.spec.seed < seeds]


def _gains_by_seed(
    pairs: Sequence[MethodPair], seeds: int, first: MetricOfRun, second: MetricOfRun
) -> dict[int, float]:
    """Return by seed how much higher the metric of the first method is, averaged over pairs; NaN is left out."""
    both = [pair.rows for pair in pairs if pair.rows is not None]
    values = [(_values_by_seed(a, seeds, first), _values_by_seed(b, seeds, second)) for a, b in both]
    common = sorted(set.intersection(*(set(row) for pair in values for row in pair))) if values else []
    return {seed: math.fsum(a[seed] - b[seed] for a, b in values) / len(values) for seed in common}


def _values_by_seed(row: Row, seeds: int, metric: MetricOfRun) -> dict[int, float]:
    values = {r.spec.seed: r.metrics[metric] if isinstance(metric, str) else metric(r) for r in _first(row, seeds)}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def describe_gain(difference: Interval | None, spec: str = "+.2f") -> str:
    """Return a difference with its interval, as text."""
    return format_difference(difference, spec) or "nothing to compare"


def _describe_bounds(low: float, high: float) -> str:
    """Return bounds in words.

    Example:
        >>> [_describe_bounds(*bounds) for bounds in ((0.0, math.inf), (-math.inf, 2.0), (-1.0, 1.0))]
        ['above 0', 'below 2', 'between -1 and 1']
    """
    if math.isinf(high):
        return f"above {low:g}"
    return f"below {high:g}" if math.isinf(low) else f"between {low:g} and {high:g}"


def _describe_scope(pairs: Sequence[MethodPair], used: Sequence[MethodPair] | None = None) -> str:
    """Return how many of how many pairs were used, and the networks, regimes and data sets of all of them."""
    if not pairs:
        return "no pairs"
    count = pluralize(len(pairs), "pair")
    count = count if used is None or len(used) == len(pairs) else f"{len(used)} of {count}"
    return f"{count} ({describe_conditions([pair.condition for pair in pairs])})"


def _unfinished(pairs: Sequence[MethodPair]) -> list[str]:
    """Return how many pairs are left out, and why; empty if none is."""
    reasons = Counter(map(_reason_of, pairs)).most_common()
    counted = [why for why, _ in reasons] if len(reasons) == 1 else [f"{count} {why}" for why, count in reasons]
    return [f"{len(pairs)} left out, {', '.join(counted)}"] if pairs else []


def _reason_of(pair: MethodPair) -> str:
    """Return why a pair cannot be compared."""
    if pair.rows is None:
        return "without a setting that finished the search"
    broken = {run.status for row in pair.rows for run in row.results} - {"finished"}
    return f"with {list_names(sorted(broken))} runs"
