"""Fine-tune a model from upright digits to rotated digits, without labels of the old ones.

python examples/finetune.py
"""

import torch
from sklearn.datasets import load_digits

import mooring

images, labels = load_digits(return_X_y=True)
upright, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
rotated = upright.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)


def train(model, optimizer, x):
    """Train for ten epochs on the first 1400 digits."""
    for batch in torch.cat([torch.randperm(1400) for _ in range(10)]).split(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


torch.manual_seed(0)
for moored in (False, True):
    model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
    train(model, torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9), upright)  # the pre-training
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    if moored:
        mooring.attach(model, optimizer, reference=upright[:640].split(20))  # inputs only: the model labels them
    train(model, optimizer, rotated)
    accuracies = [(model(x[1400:]).argmax(1) == y[1400:]).float().mean().item() for x in (upright, rotated)]
    print("moored" if moored else "plain", [f"{100 * accuracy:.1f} %" for accuracy in accuracies])
