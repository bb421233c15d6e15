"""Layers that know about runs: each gives every network what it gives alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mooring.lab.fleet.stack import batched_layers as layers
from mooring.lab.fleet.stack import norms
from mooring.lab.fleet.stack.batched_layers import LAYERS, batched_network

RUNS, BATCH = 3, 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}


# Layers, and how somebody might call them


class Calling(nn.Module):
    """A network that is one layer, called as somebody might."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> object:
        return self.call(self.layer, x)


def plainly(layer: nn.Module, x: torch.Tensor) -> object:
    return layer(x)


def attend(**rest: object) -> Callable[[nn.Module, torch.Tensor], object]:
    """Self-attention with a mask for each sample, where it asks for one."""

    def call(layer: nn.Module, x: torch.Tensor) -> object:
        told = {name: value(x) if callable(value) else value for name, value in rest.items()}
        return layer(x, x, x, **told)

    return call


def cross(layer: nn.Module, x: torch.Tensor) -> object:
    return layer(x[:, :2], key=x[:, 1:].tanh(), value=x[:, :-1].relu(), need_weights=False)


def padding(x: torch.Tensor) -> torch.Tensor:
    """The last place of every sample whose first number is positive."""
    return torch.stack([torch.zeros_like(x[:, 0, 0], dtype=torch.bool)] * 4 + [x[:, 0, 0] > 0], 1)


def each_head(x: torch.Tensor) -> torch.Tensor:
    """A number to add for each sample, head and pair of places."""
    return (x @ x.mT).tanh().repeat_interleave(2, 0) * torch.tensor([1.0, 2.0], dtype=x.dtype).repeat(len(x))[
        :, None, None
    ]


CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
IMAGE, WORDS, WIDE = (6, 5, 5), (5, 8), (6, 7)

LAYER_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, torch.Tensor], object]]] = {
    "linear": (lambda: nn.Linear(8, 3), (8,), plainly),
    "linear over words, no bias": (lambda: nn.Linear(8, 3, bias=False), WORDS, plainly),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1), IMAGE, plainly),
    "conv2d in groups": (lambda: nn.Conv2d(6, 4, 3, groups=2, bias=False), IMAGE, plainly),
    "conv2d dilated, same": (lambda: nn.Conv2d(6, 4, 3, dilation=2, padding="same"), IMAGE, plainly),
    "conv2d reflecting": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"), IMAGE, plainly),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, padding=1), WIDE, plainly),
    "conv1d circular in groups": (
        lambda: nn.Conv1d(6, 4, 3, stride=2, padding=2, groups=2, padding_mode="circular", bias=False),
        WIDE,
        plainly,
    ),
    "batch norm": (lambda: nn.BatchNorm1d(8), (8,), plainly),
    "batch norm over words": (lambda: nn.BatchNorm1d(6), WIDE, plainly),
    "batch norm of images": (lambda: nn.BatchNorm2d(6), IMAGE, plainly),
    "batch norm with nothing of its own": (
        lambda: nn.BatchNorm2d(6, affine=False, track_running_stats=False),
        IMAGE,
        plainly,
    ),
    "layer norm": (lambda: nn.LayerNorm(8), WORDS, plainly),
    "layer norm of images": (lambda: nn.LayerNorm(IMAGE), IMAGE, plainly),
    "layer norm without bias": (lambda: nn.LayerNorm((5, 8), bias=False), WORDS, plainly),
    "layer norm with nothing of its own": (
        lambda: nn.LayerNorm(8, elementwise_affine=False),
        WORDS,
        plainly,
    ),
    "group norm": (lambda: nn.GroupNorm(3, 6), IMAGE, plainly),
    "group norm of features": (lambda: nn.GroupNorm(2, 8), (8,), plainly),
    "group norm with nothing of its own": (lambda: nn.GroupNorm(2, 6, affine=False), WIDE, plainly),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), IMAGE, plainly),
    "instance norm with nothing of its own": (lambda: nn.InstanceNorm2d(6), IMAGE, plainly),
    "prelu": (lambda: nn.PReLU(), IMAGE, plainly),
    "prelu for each channel": (lambda: nn.PReLU(6), IMAGE, plainly),
    "prelu of features": (lambda: nn.PReLU(8), (8,), plainly),
    "embedding": (lambda: nn.Embedding(7, 3), WORDS, lambda layer, x: layer((3 * x).long().clamp(0, 6))),
    "embedding with padding": (
        lambda: nn.Embedding(7, 3, padding_idx=2),
        (8,),
        lambda layer, x: layer((3 * x).long().clamp(0, 6)),
    ),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), WORDS, attend()),
    "attention without weights": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, bias=False),
        WORDS,
        attend(need_weights=False),
    ),
    "attention, causal": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        WORDS,
        attend(attn_mask=CAUSAL, is_causal=True, need_weights=False),
    ),
    "attention, causal, padded": (
        lambda: nn.MultiheadAttention(8, 4, batch_first=True),
        WORDS,
        attend(attn_mask=CAUSAL, is_causal=True, key_padding_mask=padding, average_attn_weights=False),
    ),
    "attention, padded": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        WORDS,
        attend(key_padding_mask=padding, need_weights=False),
    ),
    "attention, a mask for each head": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        WORDS,
        attend(attn_mask=each_head),
    ),
    "attention across": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), WORDS, cross),
    "attention, all by name": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        WORDS,
        lambda layer, x: layer(value=x, key=x, query=x),
    ),
    "attention with dropout, in use": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.5).requires_grad_(),
        WORDS,
        lambda layer, x: layer(x, x, x) if not layer.training else x,
    ),
}


def different(network: nn.Module, seed: int) -> nn.Module:
    """A copy with parameters and buffers of its own, in float64."""
    random = torch.Generator().manual_seed(seed)
    made = copy.deepcopy(network).double()
    for name, tensor in made.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=random, dtype=tensor.dtype)
            tensor.copy_(noise + 0.5 if "var" in name else noise - 0.5)
    return made


def tensors(outputs: object) -> list[torch.Tensor]:
    found = outputs if isinstance(outputs, tuple) else (outputs,)
    return [each for each in found if each is not None]


@pytest.mark.parametrize("train", [True, False], ids=["training", "in use"])
@pytest.mark.parametrize("case", LAYER_CASES)
def test_a_layer_of_all_runs_gives_each_what_it_gives_alone(case, train):
    equals_alone(case, train)


@pytest.mark.parametrize("case", [case for case in LAYER_CASES if case.startswith(("conv", "batch norm"))])
def test_so_it_does_however_many_runs_are_done_at_once(case, monkeypatch):
    for some in (1, 2, RUNS):
        monkeypatch.setattr(layers, "_runs_per_convolution", lambda layer, x, runs, some=some: some)
        monkeypatch.setattr(norms, "MIN_VALUES_FOR_RUN_LOOP", 1 if some == 1 else 1 << 30)
        equals_alone(case, train=True)


def equals_alone(case: str, train: bool) -> None:
    """Outputs, gradients of parameters and inputs, and buffers."""
    made, shape, call = LAYER_CASES[case]
    alone = [different(Calling(made(), call), seed).train(train) for seed in range(RUNS)]
    named = {name: [dict(net.named_parameters())[name] for net in alone] for name, _ in alone[0].named_parameters()}
    parameters = {name: torch.stack(each).detach().requires_grad_() for name, each in named.items()}
    buffers = {name: torch.stack([dict(net.named_buffers())[name] for net in alone]) for name in
               dict(alone[0].named_buffers())}  # fmt: skip
    tensors_of_layer = {name.removeprefix("layer."): tensor for name, tensor in {**parameters, **buffers}.items()}
    batched = batched_network(alone[0], lambda name: (tensors_of_layer, RUNS)).train(train)
    assert isinstance(batched.layer, layers.BatchedLayer)
    inputs = torch.randn(RUNS * BATCH, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    x, parts = inputs.clone().requires_grad_(), [part.clone().requires_grad_() for part in inputs.chunk(RUNS)]
    found = tensors(batched(x))
    theirs = [tensors(network(part)) for network, part in zip(alone, parts, strict=True)]
    expected = [torch.cat(each) for each in zip(*theirs, strict=True)]
    torch.testing.assert_close(found, expected, **EXACT)
    told = [torch.randn(each.shape, dtype=each.dtype, generator=torch.Generator().manual_seed(5)) for each in found]
    sums = [sum((each * g).sum() for each, g in zip(given, told, strict=True)) for given in (found, expected)]
    asked = [x, *parameters.values()], [*parts, *(p for each in named.values() for p in each)]
    mine, others = (torch.autograd.grad(s, a, allow_unused=True) for s, a in zip(sums, asked, strict=True))
    flat = [torch.zeros_like(p) if g is None else g for p, g in zip(asked[1], others, strict=True)]
    gradients = [torch.cat(flat[:RUNS])]
    gradients += [torch.stack(flat[start : start + RUNS]) for start in range(RUNS, len(flat), RUNS)]
    mine = [torch.zeros_like(p) if g is None else g for p, g in zip(asked[0], mine, strict=True)]
    torch.testing.assert_close(mine, gradients, **EXACT)
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, torch.stack([dict(net.named_buffers())[name] for net in alone]), **EXACT)


def test_every_layer_that_knows_about_runs_is_among_the_cases():
    assert {type(made()) for made, _, _ in LAYER_CASES.values()} == set(LAYERS)


def test_what_is_not_in_a_run_s_table_is_not_taken_from_another_s():
    tensors_of_layer = {"weight": torch.randn(2, 5, 3)}
    batched = batched_network(nn.Sequential(nn.Embedding(5, 3)), lambda name: (tensors_of_layer, 2))
    for outside in (5, -1):
        with pytest.raises(IndexError):
            batched(torch.tensor([0, outside, 1, 2]))


def test_a_layer_tells_what_it_was_made_with_and_no_tensor_of_one_network():
    batched = batched_network(nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)), lambda name: ({}, 2))[0]
    assert (batched.embed_dim, batched.batch_first, batched.bias_k) == (8, True, None)
    for name in ("in_proj_weight", "out_proj", "merge_masks", "nothing"):
        assert not hasattr(batched, name)
