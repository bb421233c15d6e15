"""Tests of fine-tuning with a reference: the new task is learned, and far less of the old one is forgotten."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import mooring
from mooring.rules import Kronecker

EPOCHS, BATCH = 10, 20


class Network(nn.Module):
    """A network with one head for digits 0 to 4 and one for 5 to 9."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU())
        self.old, self.new = nn.Linear(100, 5), nn.Linear(100, 5)
        self.head = "old"

    def forward(self, x):
        return getattr(self, self.head)(self.body(x))


def digits(which):
    """Return training inputs and labels, then test inputs and labels, of digits 0 to 4 or 5 to 9."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    indices = [part[y[part] // 5 == ("old", "new").index(which)] for part in (order[:1400], order[1400:])]
    return [t for part in indices for t in (x[part], y[part] % 5)]


def train(model, optimizer, head):
    x, y, _, _ = digits(head)
    model.head = head
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, head):
    _, _, x, y = digits(head)
    model.head = head
    return 100 * (model(x).argmax(1) == y).float().mean().item()


def finetuned(seed, options, *, labels=True):
    """Return the accuracy on the old digits before and after, and on the new ones after."""
    torch.manual_seed(seed)
    model = Network()
    train(model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), "old")
    before = accuracy(model, "old")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    if options is not None:
        x, y, _, _ = digits("old")
        reference = list(zip(x.split(BATCH), y.split(BATCH), strict=True)) if labels else x.split(BATCH)
        mooring.attach(model, optimizer, exclude="new", reference=reference, **options)
    train(model, optimizer, "new")
    return before, accuracy(model, "old"), accuracy(model, "new")


@pytest.fixture(scope="module")
def plain():
    return finetuned(0, None)


@pytest.mark.parametrize(
    "labels", [pytest.param(True, id="data"), pytest.param(False, id="inputs alone", marks=pytest.mark.slow)]
)
def test_default_options_learn_the_new_task_and_forget_much_less(plain, labels):
    before, old, new = finetuned(0, {}, labels=labels)
    assert plain[0] - plain[1] > 8
    assert before - old < 0.3 * (plain[0] - plain[1])
    assert new > plain[2] - 2.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"pull": mooring.Interpolation()}, {"importance": Kronecker(), "pull": mooring.Budget(0.01)}],
    ids=["explicit", "kronecker"],
)
def test_other_options_learn_the_new_task_and_forget_less(plain, options):
    before, old, new = finetuned(0, options)
    assert before - old < 0.5 * (plain[0] - plain[1])
    assert new > plain[2] - 4
