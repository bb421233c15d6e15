"""Rows with more seeds than the tables and figures have, for claims that these do not decide."""

from collections.abc import Sequence

from mooring_lab.model.results import Result
from mooring_lab.model.spec import RunSpec
from mooring_lab.model.summary import Row
from mooring_paper.claims.claim import SeedRequest
from mooring_paper.context.paper_context import PaperContext
from mooring_paper.context.seed_statistics import summarize_seeds


class ExtendedRows:
    """The rows to which seeds were added.

    Args:
        context: trains the added seeds.
    """

    def __init__(self, context: PaperContext) -> None:
        self._context = context
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
        counts: dict[RunSpec, int] = {}
        for row, seeds in requests:
            counts[row.setting] = max(seeds, counts.get(row.setting, 0))
        runs = {row.setting: row.results[0].spec for row, _ in requests}
        specs = {
            setting: [self._context.with_seed(runs[setting], seed) for seed in range(seeds)]
            for setting, seeds in counts.items()
        }
        known = self._context.run([spec for group in specs.values() for spec in group])
        for setting, group in specs.items():
            (self._rows[setting],) = summarize_seeds(known[spec] for spec in group)
