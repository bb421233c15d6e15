"""A network with an old head and a new one."""

from torch import nn


class TwoHeads(nn.Module):
    """A body with two heads; the attribute `head` is the name of the one that is used."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body, self.old, self.new = nn.Linear(inputs, 16), nn.Linear(16, outputs), nn.Linear(16, outputs)
        self.head = "old"

    def forward(self, x):
        return getattr(self, self.head)(self.body(x).relu())
