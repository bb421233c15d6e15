"""A study run twice on one machine gives the same to the last bit on the CPU, whatever else was drawn before."""

from lab.test_kill import rows
from processes import Child, command

ASKED = ["compare", "--methods", "all", "--seeds", "2", "--limit", "20", "--tasks", "3", "--epochs", "1"]
ASKED += ["--batch", "5", "--memory", "8", "--study", "study.sqlite"]


def after_other_draws(*arguments: str) -> int:
    """The command in a process whose global random state is another."""
    import random

    import numpy
    import torch

    random.seed(7)
    numpy.random.seed(7)
    torch.manual_seed(7)
    torch.rand(1000)
    return command(*arguments)


def test_a_study_run_twice_gives_identical_results(tmp_path):
    from lab.test_determinism import after_other_draws as target

    found = []
    for name, act in (("one", command), ("other", target)):
        told = Child(tmp_path / name, act, *ASKED, patience=240).ended()
        assert told.status == 0, told.err
        found.append(rows(tmp_path / name))
    assert len(found[0]) >= 2 * 40
    assert found[0] == found[1]
