"""The paper's own numbers, to stand beside ours."""

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

__all__ = ["PLAINS", "Published", "Setting", "published", "published_setting", "published_violations"]

NAMES = {"uniform": "vanilla"}
"""What the paper calls a method."""

PLAINS = "The paper does not name plain fine-tuning's setting: here it has the explicit step's learning rate."


@dataclass(frozen=True)
class Published:
    """A cell of the paper's tables, in percent; a mean over five seeds.

    Attributes:
        accuracy, forgetting: the means.
        accuracy_std, forgetting_std: standard deviations; None where the paper gives none.
    """

    accuracy: float
    forgetting: float
    accuracy_std: float | None = None
    forgetting_std: float | None = None


@dataclass(frozen=True)
class Setting:
    """What a method was trained with.

    Attributes:
        lr: the learning rate.
        strength: of the penalty; None for methods without one.
    """

    lr: float
    strength: float | None


def published(network: str, regime: str, data: str, method: str) -> Published | None:
    """What the paper's tables say; None where they say nothing.

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
    found = _at(_everything(), network, regime, data, NAMES.get(method, method))
    return None if found is None else Published(**found)


def published_setting(network: str, regime: str, data: str, method: str) -> Setting | None:
    """What the paper's grid search found; None where it says nothing. Arguments as for `published`.

    Example:
        >>> published_setting("cnn6", "1-epoch", "cifar100", "uniform")
        Setting(lr=0.001, strength=100.0)
    """
    told = _everything()["hyperparameters"]
    name = NAMES.get(method, method)
    found = _at(told, network, regime, data, name) or _at(told, network, data, name)  # the ResNet has one regime
    return None if found is None else Setting(found["lr"], found["lambda"])


def published_violations(data: str, method: str) -> int | None:
    """How many of the paper's 1.2 million parameters violated the bound when training first became unstable.

    Example:
        >>> published_violations("cifar100", "ewc"), published_violations("digits", "ewc")
        (5, None)
    """
    found: int | None = _at(_everything(), "instability", "violations_at_first_instability", data, method)
    return found


@cache
def _everything() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(resources.files(__package__).joinpath("published.json").read_text("utf-8"))
    return told


def _at(told: Any, *keys: str) -> Any:
    for key in keys:
        told = told.get(key) if isinstance(told, dict) else None
    return told
