"""Schedules of the learning rate, as its factor at a step of a task."""

import math
from collections.abc import Callable


def warm_up_and_decay(place: float) -> float:
    """Rise linearly in the first tenth, then fall linearly to 0."""
    return min(place / 0.1, (1 - place) / 0.9)


def cosine(place: float) -> float:
    """Fall from 1 to 0 along half a cosine."""
    return (1 + math.cos(math.pi * place)) / 2


def one_cycle(place: float) -> float:
    """Rise from 1/25 to 1 in the first three tenths, then fall to 0, both along cosines."""
    if place < 0.3:
        return 1 - (1 - 1 / 25) * cosine(place / 0.3)
    return cosine((place - 0.3) / 0.7)


def two_drops(place: float) -> float:
    """Fall to a third at half of the task, and to a ninth at three quarters."""
    return 1.0 if place < 0.5 else 1 / 3 if place < 0.75 else 1 / 9


SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda place: 1.0,
    "warm-up": warm_up_and_decay,
    "cosine": cosine,
    "OneCycle": one_cycle,
    "step": two_drops,
}


def factor(schedule: str, step: int, steps: int) -> float:
    """Return what the learning rate is multiplied by in a step, from 0 to steps - 1.

    Example:
        >>> [round(factor("warm-up", step, 100), 2) for step in (0, 9, 99)]
        [0.1, 1.0, 0.01]
    """
    shift = 1 if schedule == "warm-up" else 0.5
    return SCHEDULES[schedule]((step + shift) / (steps + (0.9 if schedule == "warm-up" else 0)))
