"""The digits: upright ones are known, those on their side are new, with the same outputs."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from real_networks.problem import Problem, TwoHeads, loss_of, shuffled


def digits_problem(epochs: int | None, device: torch.device) -> Problem:
    """Return a small network for scikit-learn's digits.

    The images of other writers, at the end of the data set, are test data and reference, in turn.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images / 16, dtype=torch.float32, device=device).unsqueeze(1)
    labels = torch.tensor(data.target, device=device)
    x, y, unseen, unseen_labels = images[:1200], labels[:1200], images[1200:], labels[1200:]
    trained: dict[int, nn.Module] = {}

    def optimizer(parameters: Any, factor: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.03 * factor, momentum=0.9)

    def network(seed: int) -> nn.Module:
        if seed not in trained:
            torch.manual_seed(seed)
            body = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
            model = trained[seed] = TwoHeads(body, nn.Linear(100, 10), None).to(device)
            steps = optimizer(model.parameters(), 1.0)
            for batch in shuffled(len(x), 20, 10, device):
                steps.zero_grad()
                loss_of(model(x[batch]), y[batch]).backward()
                steps.step()
        return copy.deepcopy(trained[seed])

    def turned(images: Tensor) -> Tensor:
        return images.rot90(1, (2, 3))

    reference = unseen[::2], unseen_labels[::2]
    test, test_labels = unseen[1::2], unseen_labels[1::2]
    new = (turned(x), y), (turned(test), test_labels)
    return Problem(network, reference, (test, test_labels), *new, optimizer, epochs or 5, 20, 20)
