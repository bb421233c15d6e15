"""What methods kept and learned over seeds, and tables of it in Markdown."""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from run_log import Row, half_width
from upper_hull import upper_right

from peers.adapter_methods import METHODS, PARTS, PLAIN

EARLY = "early stopping"
NAMES = [*METHODS, EARLY]
"""The methods in the order of the figure and of its colours."""

LIMIT = 0.1
"""The rise of the old loss, in nats, up to which methods are compared."""


@dataclass(frozen=True)
class Setting:
    """A method at a value of its dial, over seeds.

    Attributes:
        method: its name.
        dial: the value.
        learned: for each seed the accuracy on the new task, or for a GPT the fall of the new loss in percent of plain
            LoRA's with the same seed.
        kept: for each seed the accuracy on the old task, or for a GPT the rise of the old loss in nats.
    """

    method: str
    dial: str
    learned: list[float]
    kept: list[float]

    @property
    def centre(self) -> tuple[float, float]:
        """The means of what was learned and kept."""
        return statistics.fmean(self.learned), statistics.fmean(self.kept)

    @property
    def errors(self) -> tuple[float, float]:
        """The half-widths of the 95 % intervals of both; nan for one seed."""
        return half_width(self.learned), half_width(self.kept)


@dataclass(frozen=True)
class Comparison:
    """The settings of all methods on one task.

    Attributes:
        title: of its panel.
        gpt: whether losses of a language model are compared, or accuracies.
        before: what the base model knows of the old task, mean over seeds.
        settings: of all methods.
    """

    title: str
    gpt: bool
    before: float
    settings: list[Setting]

    def of(self, method: str) -> list[Setting]:
        """Return the settings of a method, from the least learned to the most."""
        return sorted((s for s in self.settings if s.method == method), key=lambda s: s.centre)

    @property
    def methods(self) -> list[str]:
        """The methods that were measured, in the order of `NAMES`."""
        return [name for name in NAMES if self.of(name)]


def compare(rows: Sequence[Row]) -> Comparison:
    """Return the settings of the rows of one task; the last of several rows of a run counts."""
    if not rows:
        raise SystemExit("there are no results yet")
    first = rows[0]
    gpt = first["settings"]["task"] == "gpt"
    plain = {row["seed"]: row for row in rows if row["method"] == PLAIN and not row.get("diverged")}
    results: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    for row in rows:
        if row.get("diverged") or (gpt and row["seed"] not in plain):
            continue
        (*parts, _), (kept_before, learned_before) = row["results"], row["before"]
        named = [(row["method"], f"{row['dial']:g}", row["results"][-1])]
        named += [(EARLY, f"{number}/{PARTS}", part) for number, part in enumerate(parts, 1)]
        for method, dial, (kept, learned) in named:
            if gpt:
                most = plain[row["seed"]]["results"][-1][1] - learned_before
                kept, learned = kept_before - kept, 100 * (learned - learned_before) / most
            results.setdefault((method, dial), {})[row["seed"]] = learned, kept
    settings = [
        Setting(method, dial, *map(list, zip(*seeds.values(), strict=True)))
        for (method, dial), seeds in results.items()
    ]
    before = statistics.fmean({row["seed"]: row["before"][0] for row in rows}.values())
    title = f"GPT, {first['parameters'] / 1e6:.3g} M parameters" if gpt else "digits"
    return Comparison(title, gpt, before, settings)


def best_within(settings: Sequence[Setting], limit: float = LIMIT) -> Setting | None:
    """Return the setting that learned most with a mean rise of at most the limit, if there is one."""
    allowed = [setting for setting in settings if setting.centre[1] <= limit]
    return max(allowed, key=lambda setting: setting.centre[0], default=None)


def learned_at(settings: Sequence[Setting], limit: float = LIMIT) -> float:
    """Return what a method learns at exactly this rise, on the hull of its settings; nan beyond them."""
    corners = [(-minus, learned) for learned, minus in upper_right([(s.centre[0], -s.centre[1]) for s in settings])]
    for (low, less), (high, more) in itertools.pairwise(corners):
        if low <= limit <= high:
            return less + (more - less) * (limit - low) / (high - low)
    return math.nan


def with_error(value: float, error: float, digits: int) -> str:
    """Return "1.0 ± 0.2", without the error if it is nan.

    Example:
        >>> with_error(1.0, 0.2, 1)
        '1.0 ± 0.2'
    """
    return f"{value:.{digits}f}" + ("" if math.isnan(error) else f" ± {error:.{digits}f}")


def markdown(comparison: Comparison) -> str:
    """Return the table of a task, with 95 % intervals over seeds."""
    return _losses_table(comparison) if comparison.gpt else _accuracy_table(comparison)


def _accuracy_table(comparison: Comparison) -> str:
    """Return the setting of each method with the highest sum of both accuracies."""
    best = [max(comparison.of(name), key=lambda s: sum(s.centre)) for name in comparison.methods]
    lines = ["| method | setting | old % | new % |", "| --- | --- | --- | --- |"]
    for setting in sorted(best, key=lambda s: sum(s.centre), reverse=True):
        new, old = map(with_error, setting.centre, setting.errors, (1, 1))
        lines.append(f"| {setting.method} | {setting.dial} | {old} | {new} |")
    return "\n".join(lines)


def _losses_table(comparison: Comparison) -> str:
    """Return what each method learns at a limited rise of the old loss: its best setting, and on its hull.

    The last column is left out if no method has settings on both sides of the limit.
    """
    head = ["method", "setting", "rise, nats", "fall, % of plain LoRA's", f"at {LIMIT:g} nats, interpolated"]
    rows = []
    for name in comparison.methods:
        settings = comparison.of(name)
        best, on_hull = best_within(settings), learned_at(settings)
        chosen = best or min(settings, key=lambda s: s.centre[1])
        fall, rise = map(with_error, chosen.centre, chosen.errors, (1, 3))
        interpolated = "-" if math.isnan(on_hull) else f"{on_hull:.1f}"
        key = max(best.centre[0] if best else -math.inf, -math.inf if math.isnan(on_hull) else on_hull)
        fall = fall if best else f"{fall}, beyond {LIMIT:g} nats"
        rows.append((key, -chosen.centre[1], [name, chosen.dial, rise, fall, interpolated]))
    cells = [row for _, _, row in sorted(rows, reverse=True)]
    columns = len(head) if any(row[-1] != "-" for row in cells) else len(head) - 1
    table = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(row[:columns])} |" for row in table)
