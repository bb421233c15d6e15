"""A batched layer gives every network the outputs and gradients that it has alone."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mooring_lab.fleet.stack import batched_layers as layers
from mooring_lab.fleet.stack import norms
from mooring_lab.fleet.stack.batched_layers import LAYERS, batched_network

RUNS, BATCH = 3, 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}


# Layers, and ways to call them


class CallingNetwork(nn.Module):
    """A network with one layer, which it calls through a given function."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, torch.Tensor], object]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> object:
        return self.call(self.layer, x)


def call_directly(layer: nn.Module, x: torch.Tensor) -> object:
    return layer(x)


def attend(**options: object) -> Callable[[nn.Module, torch.Tensor], object]:
    """Call self-attention with these options; an option that is a function is computed from the input."""

    def call(layer: nn.Module, x: torch.Tensor) -> object:
        arguments = {name: value(x) if callable(value) else value for name, value in options.items()}
        return layer(x, x, x, **arguments)

    return call


def cross_attend(layer: nn.Module, x: torch.Tensor) -> object:
    return layer(x[:, :2], key=x[:, 1:].tanh(), value=x[:, :-1].relu(), need_weights=False)


def padding(x: torch.Tensor) -> torch.Tensor:
    """Hide the last position of every sample whose first value is positive."""
    return torch.stack([torch.zeros_like(x[:, 0, 0], dtype=torch.bool)] * 4 + [x[:, 0, 0] > 0], 1)


def mask_per_head(x: torch.Tensor) -> torch.Tensor:
    """Return an additive mask for each sample, head and pair of positions."""
    return (x @ x.mT).tanh().repeat_interleave(2, 0) * torch.tensor([1.0, 2.0], dtype=x.dtype).repeat(len(x))[
        :, None, None
    ]


CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
IMAGE, WORDS, WIDE = (6, 5, 5), (5, 8), (6, 7)

LAYER_CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, torch.Tensor], object]]] = {
    "linear": (lambda: nn.Linear(8, 3), (8,), call_directly),
    "linear over words, no bias": (lambda: nn.Linear(8, 3, bias=False), WORDS, call_directly),
    "conv2d": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1), IMAGE, call_directly),
    "conv2d in groups": (lambda: nn.Conv2d(6, 4, 3, groups=2, bias=False), IMAGE, call_directly),
    "conv2d dilated, same": (lambda: nn.Conv2d(6, 4, 3, dilation=2, padding="same"), IMAGE, call_directly),
    "conv2d with reflect padding": (
        lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
        IMAGE,
        call_directly,
    ),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, padding=1), WIDE, call_directly),
    "conv1d circular in groups": (
        lambda: nn.Conv1d(6, 4, 3, stride=2, padding=2, groups=2, padding_mode="circular", bias=False),
        WIDE,
        call_directly,
    ),
    "batch norm": (lambda: nn.BatchNorm1d(8), (8,), call_directly),
    "batch norm over words": (lambda: nn.BatchNorm1d(6), WIDE, call_directly),
    "batch norm of images": (lambda: nn.BatchNorm2d(6), IMAGE, call_directly),
    "batch norm without tensors": (
        lambda: nn.BatchNorm2d(6, affine=False, track_running_stats=False),
        IMAGE,
        call_directly,
    ),
    "layer norm": (lambda: nn.LayerNorm(8), WORDS, call_directly),
    "layer norm of images": (lambda: nn.LayerNorm(IMAGE), IMAGE, call_directly),
    "layer norm without bias": (lambda: nn.LayerNorm((5, 8), bias=False), WORDS, call_directly),
    "layer norm without tensors": (
        lambda: nn.LayerNorm(8, elementwise_affine=False),
        WORDS,
        call_directly,
    ),
    "group norm": (lambda: nn.GroupNorm(3, 6), IMAGE, call_directly),
    "group norm of features": (lambda: nn.GroupNorm(2, 8), (8,), call_directly),
    "group norm without tensors": (lambda: nn.GroupNorm(2, 6, affine=False), WIDE, call_directly),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), IMAGE, call_directly),
    "instance norm without tensors": (lambda: nn.InstanceNorm2d(6), IMAGE, call_directly),
    "prelu": (lambda: nn.PReLU(), IMAGE, call_directly),
    "prelu for each channel": (lambda: nn.PReLU(6), IMAGE, call_directly),
    "prelu of features": (lambda: nn.PReLU(8), (8,), call_directly),
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
        attend(attn_mask=mask_per_head),
    ),
    "cross-attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), WORDS, cross_attend),
    "attention with keyword arguments": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        WORDS,
        lambda layer, x: layer(value=x, key=x, query=x),
    ),
    "attention with dropout, in evaluation": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.5).requires_grad_(),
        WORDS,
        lambda layer, x: layer(x, x, x) if not layer.training else x,
    ),
}


def randomized(network: nn.Module, seed: int) -> nn.Module:
    """Return a copy with random parameters and buffers, in float64."""
    random = torch.Generator().manual_seed(seed)
    random_copy = copy.deepcopy(network).double()
    for name, tensor in random_copy.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.rand(tensor.shape, generator=random, dtype=tensor.dtype)
            tensor.copy_(noise + 0.5 if "var" in name else noise - 0.5)
    return random_copy


def output_tensors(outputs: object) -> list[torch.Tensor]:
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    return [tensor for tensor in results if tensor is not None]


@pytest.mark.parametrize("train", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", LAYER_CASES)
def test_batched_layer_equals_the_layer_of_each_network(case, train):
    assert_equals_single_networks(case, train)


@pytest.mark.parametrize("case", [case for case in LAYER_CASES if case.startswith(("conv", "batch norm"))])
def test_result_does_not_depend_on_the_number_of_runs_per_call(case, monkeypatch):
    for size in (1, 2, RUNS):
        monkeypatch.setattr(layers, "_runs_per_convolution", lambda layer, x, runs, size=size: size)
        monkeypatch.setattr(norms, "MIN_VALUES_FOR_RUN_LOOP", 1 if size == 1 else 1 << 30)
        assert_equals_single_networks(case, train=True)


def assert_equals_single_networks(case: str, train: bool) -> None:
    """Compare outputs, gradients of parameters and inputs, and buffers."""
    create, shape, call = LAYER_CASES[case]
    alone = [randomized(CallingNetwork(create(), call), seed).train(train) for seed in range(RUNS)]
    named = {name: [dict(net.named_parameters())[name] for net in alone] for name, _ in alone[0].named_parameters()}
    parameters = {name: torch.stack(rows).detach().requires_grad_() for name, rows in named.items()}
    buffers = {name: torch.stack([dict(net.named_buffers())[name] for net in alone]) for name in
               dict(alone[0].named_buffers())}  # fmt: skip
    tensors_of_layer = {name.removeprefix("layer."): tensor for name, tensor in {**parameters, **buffers}.items()}
    batched = batched_network(alone[0], lambda name: (tensors_of_layer, RUNS)).train(train)
    assert isinstance(batched.layer, layers.BatchedLayer)
    inputs = torch.randn(RUNS * BATCH, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    x, parts = inputs.clone().requires_grad_(), [part.clone().requires_grad_() for part in inputs.chunk(RUNS)]
    actual = output_tensors(batched(x))
    single = [output_tensors(network(part)) for network, part in zip(alone, parts, strict=True)]
    expected = [torch.cat(rows) for rows in zip(*single, strict=True)]
    torch.testing.assert_close(actual, expected, **EXACT)
    directions = [torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5)) for out in actual]
    sums = [sum((out * g).sum() for out, g in zip(outs, directions, strict=True)) for outs in (actual, expected)]
    inputs_of = [x, *parameters.values()], [*parts, *(p for rows in named.values() for p in rows)]
    gradients, single_gradients = (
        torch.autograd.grad(s, of, allow_unused=True, materialize_grads=True)
        for s, of in zip(sums, inputs_of, strict=True)
    )
    stacked = [torch.cat(single_gradients[:RUNS])]
    starts = range(RUNS, len(single_gradients), RUNS)
    stacked += [torch.stack(single_gradients[start : start + RUNS]) for start in starts]
    torch.testing.assert_close(list(gradients), stacked, **EXACT)
    for name, buffer in buffers.items():
        torch.testing.assert_close(buffer, torch.stack([dict(net.named_buffers())[name] for net in alone]), **EXACT)


def test_every_batched_layer_has_a_case():
    assert {type(create()) for create, _, _ in LAYER_CASES.values()} == set(LAYERS)


def test_invalid_embedding_index_does_not_reach_another_run():
    tensors_of_layer = {"weight": torch.randn(2, 5, 3)}
    batched = batched_network(nn.Sequential(nn.Embedding(5, 3)), lambda name: (tensors_of_layer, 2))
    for outside in (5, -1):
        with pytest.raises(IndexError):
            batched(torch.tensor([0, outside, 1, 2]))


def test_batched_layer_exposes_settings_but_no_tensors():
    batched = batched_network(nn.Sequential(nn.MultiheadAttention(8, 2, batch_first=True)), lambda name: ({}, 2))[0]
    assert (batched.embed_dim, batched.batch_first, batched.bias_k) == (8, True, None)
    for name in ("in_proj_weight", "out_proj", "merge_masks", "nothing"):
        assert not hasattr(batched, name)
