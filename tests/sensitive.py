"""A small network in which whatever is left changed shows: statistics, random numbers, a buffer that counts passes."""

import torch
from torch import nn

__all__ = ["Net"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(1, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4 * 16, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.head(self.drop(torch.relu(self.norm(self.features(x)))).flatten(1))
