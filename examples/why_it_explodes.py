"""Train with an EWC penalty that is too strong, diagnose it, and follow the advice.

python examples/why_it_explodes.py
"""

import argparse

import torch
from digits import Network, digit_tasks
from torch import nn

import mooring
from mooring.errors import NonFiniteError


def learn_two_tasks(pull: mooring.Penalty | mooring.Proximal | mooring.Interpolation) -> mooring.Mooring:
    """Train on the first two tasks and print the outcome."""
    torch.manual_seed(0)
    tasks = digit_tasks()
    model = Network(len(tasks))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    moor = mooring.attach(model, optimizer, importance=mooring.EWC(decay=None), pull=pull, exclude="heads")
    try:
        for model.task in (0, 1):
            x, y, _, _ = tasks[model.task]
            for batch in torch.randperm(len(x)).split(10):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
            if model.task == 0:
                moor.consolidate()
        print(f"{pull}: trained, pull energy {moor.pull_energy():.2g}")
    except NonFiniteError as error:
        print(f"{pull}: stopped after {moor.steps} steps: {error}")
    return moor


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    exploded = learn_two_tasks(mooring.Penalty(1e6))
    diagnosis = exploded.diagnose()
    print(f"\n{diagnosis}\n")
    learn_two_tasks(mooring.Penalty(0.9 * diagnosis.safe_strength))
    learn_two_tasks(mooring.Penalty(1e6, clamp=True))
    learn_two_tasks(mooring.Proximal(1e6))
    learn_two_tasks(mooring.Interpolation())
