"""Sentences about a section, computed from its runs: what was compared, and the outcome."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mooring.lab.model.plurals import pluralize
from mooring.lab.model.scenarios import SCENARIOS, scenario_title
from mooring.lab.model.spec import RunSpec
from mooring.report.numbers import bounds, fixed, given, printable
from mooring.report.section import Entry, Section

JOINT = "joint"


def compared(section: Section) -> str:
    """Return one sentence on what was compared."""
    settings = [entry.row.setting for entry in section.entries]
    methods = len({setting.method for setting in settings})
    seeds = sorted({result.spec.seed for result in section.results})
    at = f" at {len(settings)} settings" if len(settings) > methods else ""
    scenario = section.entries[0].row.scenario
    parts = [
        f"{pluralize(methods, 'method')}{at} on {pluralize(section.tasks, 'task')}",
        f"{scenario_title(scenario)} ({SCENARIOS[scenario]})",
        f"{pluralize(len(seeds), 'seed')} ({ranges(seeds)})",
        f"network {_shared(settings, lambda setting: printable(setting.network, 60))}",
        f"{_shared(settings, lambda setting: setting.epochs)} epochs a task",
        f"batches of {_shared(settings, lambda setting: setting.batch)}",
        f"learning rate {_shared(settings, lambda setting: setting.lr)}",
        f"computed in {_shared(settings, lambda setting: setting.dtype)}",
    ]
    return ", ".join(parts) + "."


def outcome(section: Section) -> list[str]:
    """Return sentences on the outcome; a sentence is left out if the section has no runs for it."""
    sentences = (_best(section), _best_without_memory(section), _gap(section), _stability(section))
    return [sentence for sentence in sentences if sentence]


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as a short list with ranges.

    Example:
        >>> ranges([0, 1, 2, 5, 7, 8])
        '0–2, 5, 7, 8'
    """
    groups: list[list[int]] = []
    for number in sorted(set(numbers)):
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(f"{run[0]}\u2013{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in groups)


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    Example:
        >>> duration(12.34), duration(125.0), duration(7300.0)
        ('12.3 s', '2 min 5 s', '2 h 1 min')
    """
    if not math.isfinite(seconds) or seconds < 60:
        return f"{fixed(seconds, 1)} s"
    minutes, remainder = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {remainder} s"
    return f"{minutes // 60} h {minutes % 60} min"


def _ranked(section: Section) -> list[Entry]:
    """Return the best setting of each method, best first, without joint training and settings that lost a seed."""
    complete = (entry for entry in section.shown if entry.complete and entry.row.setting.method != JOINT)
    return sorted(complete, key=lambda entry: -entry.accuracy)


def _best(section: Section) -> str:
    """Name the best method, how many others are as good, and how its setting was chosen."""
    ranked = _ranked(section)
    if not ranked:
        others = any(entry.row.setting.method != JOINT for entry in section.shown)
        return "No method finished in every seed." if others else ""
    best = ranked[0]
    accuracy, forgetting = best.row.metrics["accuracy"], best.row.metrics["forgetting"]
    interval = "" if accuracy.count < 2 else f" (95 % interval {bounds(accuracy)})"
    text = f"The best method was {_named(best)}: {fixed(accuracy.mean)} % average accuracy{interval}, "
    text += f"{fixed(forgetting.mean)} points forgotten."
    overlapping = sum(entry.row.metrics["accuracy"].high >= accuracy.low for entry in ranked[1:])
    if overlapping:
        text += f" The intervals of {overlapping} of the {len(ranked) - 1} other methods overlap its own."
    settings = sum(entry.contender == best.contender for entry in section.entries)
    if settings > 1:
        text += f" Its setting is the best of {settings}, chosen by the accuracy shown here."
    return text


def _best_without_memory(section: Section) -> str:
    """Name the best method that keeps no old samples, if the best of all methods keeps some."""
    ranked = _ranked(section)
    memoryless = [entry for entry in ranked if entry.row.setting.memory is None]
    if not memoryless or memoryless[0] is ranked[0]:
        return ""
    best = memoryless[0]
    text = f"Of the methods that keep no old samples, {_named(best)} was best: {fixed(best.accuracy)} %, "
    return text + f"{fixed(best.row.metrics['forgetting'].mean)} points forgotten."


def _gap(section: Section) -> str:
    """Compare plain fine-tuning with joint training, and say how much of the gap the best method closed."""
    plain, joint = (_accuracy(section, method) for method in ("plain", JOINT))
    if plain is None or joint is None:
        return ""
    gap = joint - plain
    text = f"Plain fine-tuning ended {fixed(abs(gap))} points {'below' if gap >= 0 else 'above'} joint training"
    best = next(iter(_ranked(section)), None)
    if gap > 0 and best is not None and best.accuracy > joint:
        text += f"; {best.method} ended {fixed(best.accuracy - joint)} points above it"
    elif gap > 0 and best is not None and best.accuracy > plain:
        text += f"; {best.method} closed {fixed(100 * (best.accuracy - plain) / gap, 0)} % of this gap"
    return f"{text}."


def _stability(section: Section) -> str:
    results = section.results
    counts = {status: sum(result.status == status for result in results) for status in ("unstable", "rejected")}
    failures = [f"{number} {'was' if number == 1 else 'were'} {status}" for status, number in counts.items() if number]
    if not failures:
        return f"All {pluralize(len(results), 'run')} finished." if len(results) > 1 else "The run finished."
    return f"Of {pluralize(len(results), 'run')}, {' and '.join(failures)}."


def _accuracy(section: Section, method: str) -> float | None:
    accuracies = [entry.accuracy for entry in section.shown if entry.row.setting.method == method]
    return accuracies[0] if len(accuracies) == 1 and math.isfinite(accuracies[0]) else None


def _named(entry: Entry) -> str:
    return f"{entry.method} ({entry.detail})" if entry.detail else entry.method


def _shared(settings: Sequence[RunSpec], of: Callable[[RunSpec], Any]) -> str:
    """Return the common value of the settings, or all their values."""
    values = sorted({of(setting) for setting in settings})
    return ", ".join(given(value) if isinstance(value, float) else str(value) for value in values)
