"""The scenarios of continual learning: which head a task has, and whether the task is known at test time.

The names are those of van de Ven and Tolias, "Three scenarios for continual learning", 2019.
"""

SCENARIOS = {
    "task": "one head per task; the task is known at test time",
    "class": "one head that grows by the classes of each task; the task is not known at test time",
    "domain": "one head for all tasks, which have the same outputs; the task is not known at test time",
}
"""What each scenario means, by name."""


def scenario_title(scenario: str) -> str:
    """Return the name of a scenario in tables.

    Example:
        >>> scenario_title("class")
        'class-incremental'
    """
    return f"{scenario}-incremental"
