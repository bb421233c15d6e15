"""Fine-tune a model from upright digits to digits on their side, without labels of the upright ones.

python examples/finetune.py
"""

import torch
from sklearn.datasets import load_digits

import mooring

images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
upright = images.float() / 16
sideways = upright.view(-1, 8, 8).rot90(1, (1, 2)).flatten(1)


def train(inputs):
    """Take 700 steps; the first 1400 digits are for training."""
    for batch in torch.randint(1400, (700, 20)):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
        optimizer.step()


def show(when):
    """Print the accuracy on the other digits."""
    right = [(model(x[1400:]).argmax(1) == labels[1400:]).float().mean() for x in (upright, sideways)]
    print(f"{when}: old task {right[0]:.1%}, new task {right[1]:.1%}")


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
train(upright)
show("before")
moor = mooring.attach(model, optimizer, reference=upright[:640].split(20))  # old inputs, without labels
train(sideways)
print("forgotten:", moor.finish())
show("after")
