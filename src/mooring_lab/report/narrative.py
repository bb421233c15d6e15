"""Sentences about a section, computed from its runs: what was compared, and the outcome."""

import math
from collections.abc import Iterable, Sequence

from mooring_lab.model.plurals import pluralize
from mooring_lab.model.scenarios import SCENARIOS, scenario_title
from mooring_lab.model.winners import JOINT, MIN_SEEDS, surely_better
from mooring_lab.report.numbers import bounds, fixed
from mooring_lab.report.section import Entry, Section

MAX_NAMES = 5
"""How many methods a sentence names; it counts the others."""


def headline(sections: Sequence[Section]) -> str:
    """Return the title of a page that has none.

    Example:
        >>> headline([])
        'No methods'
    """
    methods = list(dict.fromkeys(entry.method for section in sections for entry in section.entries))
    streams = "; ".join(section.stream for section in sections[:MAX_NAMES])
    subject = methods[0] if len(methods) == 1 else f"{len(methods) or 'No'} methods"
    return f"{subject} on {streams}" if streams else subject


def listed(names: Sequence[str]) -> str:
    """Return names as a phrase, the first few of many.

    Example:
        >>> listed(["a", "b", "c"]), listed([*"abcdefg"])
        ('a, b and c', 'a, b, c, d, e and 2 more')
    """
    names = names if len(names) <= MAX_NAMES else [*names[:MAX_NAMES], f"{len(names) - MAX_NAMES} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def compared(section: Section) -> str:
    """Return one sentence on what was compared; the settings are beside it."""
    methods = len({entry.row.setting.method for entry in section.entries})
    seeds = sorted({result.spec.seed for result in section.results})
    at = f" at {len(section.entries)} settings" if len(section.entries) > methods else ""
    scenario = section.entries[0].row.scenario
    return (
        f"{pluralize(methods, 'method')}{at} on {pluralize(section.tasks, 'task')}, {scenario_title(scenario)} "
        f"({SCENARIOS[scenario]}), {pluralize(len(seeds), 'seed')} ({ranges(seeds)})."
    )


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
    """Name the method with the highest mean, whether it is surely the best, and how its setting was chosen."""
    ranked = _ranked(section)
    if not ranked:
        others = any(entry.row.setting.method != JOINT for entry in section.shown)
        return "No method finished in every seed." if others else ""
    text = _leader(ranked, "method")
    settings = sum(entry.contender == ranked[0].contender for entry in section.entries)
    if settings > 1:
        text += f" Its setting is the best of {settings}, chosen by the accuracy shown here."
    return text


def _best_without_memory(section: Section) -> str:
    """Name the leader of the methods that keep no old samples, if the leader of all methods keeps some."""
    ranked = _ranked(section)
    memoryless = [entry for entry in ranked if entry.row.setting.memory is None]
    if not memoryless or memoryless[0] is ranked[0]:
        return ""
    return _leader(memoryless, "method that keeps no old samples")


def _leader(ranked: Sequence[Entry], kind: str) -> str:
    """Return the scores of the first of these methods; it is the best only if it is surely ahead of all others."""
    first, others = ranked[0], ranked[1:]
    accuracy, forgetting = first.row.metrics["accuracy"], first.row.metrics["forgetting"]
    interval = "" if accuracy.count < 2 else f" (95 % interval {bounds(accuracy)})"
    scores = f"{fixed(accuracy.mean)} % average accuracy{interval}, {fixed(forgetting.mean)} points of forgetting (T)."
    if not others:
        return f"The only {kind} that finished in every seed was {_named(first)}: {scores}"
    mean = f"The {kind} with the highest mean was {_named(first)}: {scores}"
    if accuracy.count < MIN_SEEDS:
        return f"{mean} It is not called the best: that takes {MIN_SEEDS} seeds or more, not {accuracy.count}."
    rivals = [entry for entry in others if not surely_better(first.row, entry.row, "accuracy")]
    if rivals:
        count = f"{len(rivals)} of the {len(others)} other methods" if len(others) > 1 else "the other method"
        names = f" ({listed([rival.method for rival in rivals])})" if len(others) > 1 else ""
        return f"{mean} It is not surely the best: seed by seed, its difference from {count}{names} may be 0."
    return (
        f"The best {kind} was {_named(first)}: {scores} Seed by seed it is ahead of every other: the 95 % "
        "intervals of its differences exclude 0."
    )


def _gap(section: Section) -> str:
    """Compare plain fine-tuning and the most accurate method with joint training."""
    plain, joint = (_accuracy(section, method) for method in ("plain", JOINT))
    if plain is None or joint is None:
        return ""
    gap = joint - plain
    text = f"Plain fine-tuning ended {fixed(abs(gap))} points {'below' if gap >= 0 else 'above'} joint training"
    best = next(iter(_ranked(section)), None)
    if gap > 0 and best is not None and best.accuracy > joint:
        text += f", which sees all tasks at once; {best.method} ended {fixed(best.accuracy - joint)} points above it"
    elif gap > 0 and best is not None and best.accuracy > plain:
        share = fixed(100 * (best.accuracy - plain) / gap, 0)
        text += f", which sees all tasks at once; {best.method} closed {share} % of this gap"
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
