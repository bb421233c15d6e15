"""Small networks with one head or several, and low-rank adapters of their linear layers."""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from mooring.curvature import LowRank

WIDTH = 32
"""The width of transformers, recurrent networks and embeddings."""

RANK = 4
"""The rank of adapters."""


class HeadedNetwork(nn.Module):
    """A body with one linear head for all tasks, or one for each of them.

    Args:
        body: gives features, whose last dimension has the size `width`.
        width: the number of features.
        classes: the number of classes of each head.
        heads: the number of heads.

    Attributes:
        head: the number of the head that is used.
    """

    def __init__(self, body: nn.Module, width: int, classes: int, heads: int = 1) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleList(nn.Linear(width, classes) for _ in range(heads))
        self.head = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the head that is used."""
        logits: Tensor = self.heads[self.head](self.body(x))
        return logits

    def use_head(self, task: int) -> None:
        """Use the head of a task; one head is for all tasks."""
        self.head = min(task, len(self.heads) - 1)


class AttentionBlock(nn.Module):
    """A pre-norm transformer block whose projections are linear layers, so that they can be adapted."""

    def __init__(self, causal: bool, heads: int = 2) -> None:
        super().__init__()
        self.causal, self.attention_heads = causal, heads
        self.first_norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape, (batch, time, width)."""
        batch, time, _ = x.shape
        split = self.mix(self.first_norm(x)).view(batch, time, 3, self.attention_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=self.causal)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.second_norm(x))))


class TinyTransformer(nn.Module):
    """A transformer over tokens, or over vectors, with features of each place or their mean.

    Args:
        vocabulary: the number of tokens; None for vectors.
        time: the length of a sequence.
        size: the size of vectors.
        pooled: whether to return the mean over places.
        causal: whether a place sees only those before it.
    """

    def __init__(
        self, vocabulary: int | None, time: int, *, size: int = 1, pooled: bool = False, causal: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(size, WIDTH) if vocabulary is None else nn.Embedding(vocabulary, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(time, WIDTH))
        self.block, self.norm, self.pooled = AttentionBlock(causal), nn.LayerNorm(WIDTH), pooled

    def forward(self, x: Tensor) -> Tensor:
        """Return features (batch, time, width), or (batch, width)."""
        features: Tensor = self.norm(self.block(self.embed(x) + self.places[: x.shape[1]]))
        return features.mean(1) if self.pooled else features


class GatedRecurrence(nn.Module):
    """A GRU over vectors, with the features of the last step."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.cells = nn.GRU(size, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (batch, width)."""
        outputs: Tensor = self.cells(x)[0]
        return outputs[:, -1]


class WordBag(nn.Module):
    """The mean of embeddings, and a hidden layer."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(vocabulary, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return features (batch, 64)."""
        return functional.relu(self.hidden(self.embed(x).mean(1)))


class ResidualLayer(nn.Module):
    """x + dropout(relu(linear(norm(x))))."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        features: Tensor = x + self.dropout(functional.relu(self.linear(self.norm(x))))
        return features


def perceptron(inputs: int, width: int = 100, layers: int = 1) -> nn.Module:
    """Return hidden layers with ReLU."""
    sizes = [inputs, *[width] * layers]
    pairs = itertools.pairwise(sizes)
    return nn.Sequential(nn.Flatten(), *[part for a, b in pairs for part in (nn.Linear(a, b), nn.ReLU())])


def residual_perceptron(inputs: int, width: int = 64) -> nn.Module:
    """Return residual layers with layer norm and dropout."""
    return nn.Sequential(nn.Linear(inputs, width), *[ResidualLayer(width, 0.1) for _ in range(3)], nn.LayerNorm(width))


def convolutions(norm: Callable[[int], nn.Module] = lambda width: nn.Identity()) -> nn.Module:
    """Return two convolutions and a linear layer for images of 8 by 8 pixels; 64 features."""
    first = [nn.Conv2d(1, 16, 3, padding=1), norm(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), norm(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(128, 64), nn.ReLU())


class AdaptedLinear(nn.Module):
    """A frozen linear layer and a trained low-rank change of its weights."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        """Return base(x) + 2 x A' B'."""
        result: Tensor = self.base(x) + 2.0 * x @ self.a.T @ self.b.T
        return result

    def mooring_low_rank(self) -> list[LowRank]:
        """Return the factors, by which Mooring knows the product."""
        return [LowRank(self.a, self.b, scale=2.0, layer=self.base)]


def adapt(model: HeadedNetwork) -> None:
    """Freeze a network, and adapt its linear layers; of several heads the old one is frozen, and new ones train."""
    model.requires_grad_(False)
    targets = [(m, name, part) for m in model.modules() for name, part in m.named_children() if type(part) is nn.Linear]
    for parent, name, layer in targets:
        if parent is not model.heads:
            setattr(parent, name, AdaptedLinear(layer))
    if len(model.heads) == 1:
        model.heads[0] = AdaptedLinear(model.heads[0])
    for head in list(model.heads)[1:]:
        head.requires_grad_(True)
