"""Runs of several methods on every data set in the first regime, at the paper's settings or at given ones."""

from collections.abc import Mapping

from mooring.lab.methods import find_method
from mooring.lab.model.results import Result
from mooring.paper.context.paper_context import PaperContext
from mooring.paper.context.scale import Condition, Scale
from mooring.paper.published.published_numbers import Setting, published_setting

__all__ = ["MethodRuns", "paper_setting", "train_methods"]

MethodRuns = dict[str, dict[str, list[Result]]]
"""Results by data set and method, one for each seed."""


def paper_setting(scale: Scale, condition: Condition, method: str, source: str | None = None) -> Setting:
    """Return the paper's setting of a method; without one, the first of the learning rates and the default strength.

    Args:
        scale: provides the learning rate if the paper has none.
        condition: network, regime and data set.
        method: the method to train.
        source: the method whose published setting is used, if it is a variant of one.

    Example:
        >>> from mooring.paper.context.scale import PAPER
        >>> paper_setting(PAPER, PAPER.conditions()[1], "si").lr
        0.003
    """
    setting = published_setting(condition.network, condition.regime.name, condition.data, source or method)
    if setting is None:
        return Setting(scale.lrs[0], find_method(method).strength)
    return Setting(setting.lr, setting.strength if find_method(method).has_strength else None)


def train_methods(
    context: PaperContext,
    methods: Mapping[str, str],
    settings: Mapping[Condition, Mapping[str, Setting]] | None = None,
) -> MethodRuns:
    """Return the runs of methods on every data set in the first regime, trained together.

    Args:
        context: trains them.
        methods: the method whose setting is used, for each method.
        settings: settings by condition and method; the paper's where one is missing.
    """
    scale = context.scale
    specs = {}
    for condition in scale.first_conditions():
        for method, source in methods.items():
            setting = (settings or {}).get(condition, {}).get(source)
            if setting is None:
                setting = paper_setting(scale, condition, method, source)
            specs[condition.data, method] = [
                context.spec(condition, method, seed, setting) for seed in range(scale.seeds)
            ]
    known = context.run([spec for seeds in specs.values() for spec in seeds])
    return {
        data: {method: [known[spec] for spec in specs[data, method]] for method in methods} for data in scale.streams
    }
