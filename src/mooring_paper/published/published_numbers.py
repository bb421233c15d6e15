"""The numbers that the paper reports."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

PAPER_NAMES = {"uniform": "vanilla"}
"""The paper's name of a method, where it differs from ours."""

PLAIN_SETTING_NOTE = (
    "The paper does not give the setting of plain fine-tuning: here it uses the explicit step's learning rate."
)


@dataclass(frozen=True)
class PublishedCell:
    """A cell of the paper's tables, in percent, averaged over five seeds.

    Attributes:
        accuracy, forgetting: the means.
        accuracy_std, forgetting_std: the standard deviations; None where the paper gives none.
    """

    accuracy: float
    forgetting: float
    accuracy_std: float | None = None
    forgetting_std: float | None = None


@dataclass(frozen=True)
class Setting:
    """The hyper-parameters of a method.

    Attributes:
        lr: the learning rate.
        strength: the strength of the penalty; None for methods without one.
    """

    lr: float
    strength: float | None


def published(network: str, regime: str, data: str, method: str) -> PublishedCell | None:
    """Return a cell of the paper's tables; None if the paper does not report it.

    Args:
        network: "cnn6" or "resnet18-third".
        regime: "1-epoch" or "30-epochs".
        data: "cifar100", "flowers102" or "caltech256".
        method: a name from the registry.

    Example:
        >>> published("cnn6", "1-epoch", "cifar100", "explicit-mas").accuracy
        64.0
        >>> published("cnn6", "1-epoch", "cifar100", "frozen") is None
        True
    """
    cell = _lookup(_all_numbers(), network, regime, data, PAPER_NAMES.get(method, method))
    return None if cell is None else PublishedCell(**cell)


def published_setting(network: str, regime: str, data: str, method: str) -> Setting | None:
    """Return the setting that the paper's grid search chose; None if not reported. Arguments as for `published`.

    Example:
        >>> published_setting("cnn6", "1-epoch", "cifar100", "uniform")
        Setting(lr=0.001, strength=100.0)
    """
    settings = _all_numbers()["hyperparameters"]
    name = PAPER_NAMES.get(method, method)
    # The ResNet was trained in one regime only, so its entries have no regime.
    setting = _lookup(settings, network, regime, data, name) or _lookup(settings, network, data, name)
    return None if setting is None else Setting(setting["lr"], setting["lambda"])


def setting_source(method: str) -> str:
    """Return the method whose published setting a method takes: plain, which has none, takes the explicit step's.

    Example:
        >>> setting_source("plain"), setting_source("ewc")
        ('explicit-ewc', 'ewc')
    """
    return "explicit-ewc" if method == "plain" else method


def published_violations(data: str, method: str) -> int | None:
    """Return how many of the paper's 1.2 million parameters violated the bound when training first became unstable.

    Example:
        >>> published_violations("cifar100", "ewc"), published_violations("digits", "ewc")
        (5, None)
    """
    count: int | None = _lookup(_all_numbers(), "instability", "violations_at_first_instability", data, method)
    return count


@cache
def _all_numbers() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(resources.files(__package__).joinpath("published.json").read_text("utf-8"))
    return numbers


def _lookup(numbers: Any, *keys: str) -> Any:
    """Return a value of a nested dictionary; None if a key is missing."""
    for key in keys:
        numbers = numbers.get(key) if isinstance(numbers, dict) else None
    return numbers
