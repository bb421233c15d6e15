"""A stack of networks of one architecture: the forward pass of every run of a fleet at once."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from mooring_lab.fleet.stack.batched_layers import LAYERS, BatchedLayer, ForwardCallback, batched_network
from mooring_lab.model.order import seeded_generator
from mooring_lab.networks.inputs import normalize_pixels
from mooring_lab.networks.multi_head import Head, MultiHeadNetwork, is_standard_layer

Tensors = dict[str, Tensor]

MODE_TOLERANCE = 0.001
"""Largest relative difference between a mode's outputs and those of each network alone: sums have another order."""

_MODES: dict[tuple[object, ...], str] = {}
"""The result of `fastest_mode`, by architecture."""


class Stack:
    """The weights of several networks of one architecture, each parameter and buffer with a leading run axis.

    A stack runs in one of three execution modes. It takes the first one that gives the outputs of the single networks:

    - "batched": the network's own forward pass on the samples of all runs as one batch, with batched layers.
    - "vmap": `torch.func.vmap`, for networks with other layers.
    - "sequential": one network after the other, each with its own random numbers, for forward passes that branch on
      values or draw random numbers.

    Args:
        networks: one for each run.
        device: where to compute.
        seeds: the seed of each run's random numbers, for forward passes that draw any.
        compute_dtype: the dtype of matrix products in the forward pass; None for the dtype of the parameters.
        mode: the execution mode, if it is known; otherwise `fastest_mode` chooses it.

    Attributes:
        parameters: by name, each of shape (runs, ...).
        buffers: by name, each of shape (runs, ...).
        mode: "batched", "vmap" or "sequential".
        network: one network of the architecture.
        batched: the network with batched layers; None if it has layers that cannot be batched.
        frozen_norms: whether normalization layers use their running statistics in training mode too.

    Example:
        >>> from torch import nn
        >>> stack = Stack([MultiHeadNetwork(nn.Flatten(), outputs=2, heads=1, shape=(1, 2, 2)) for _ in range(3)])
        >>> stack(torch.zeros(3, 5, 1, 2, 2), head=0).shape
        torch.Size([3, 5, 2])
    """

    def __init__(
        self,
        networks: Sequence[MultiHeadNetwork],
        device: torch.device | str = "cpu",
        seeds: Sequence[int] = (),
        compute_dtype: torch.dtype | None = None,
        mode: str = "",
    ) -> None:
        self.compute_dtype, self.device = compute_dtype, torch.device(device)
        self.network = deepcopy(networks[0]).to(self.device)
        distinct = {id(network): network for network in networks}  # many runs may start from one network
        rows = torch.tensor([list(distinct).index(id(network)) for network in networks], device=self.device)
        self.parameters = self._stack([dict(network.named_parameters()) for network in distinct.values()], rows)
        self.buffers = self._stack([dict(network.named_buffers()) for network in distinct.values()], rows)
        self.seeds, self.calls = list(seeds) or [0] * len(networks), 0
        self.frozen_norms = False
        self.tensor_names = _names_by_layer(self.parameters), _names_by_layer(self.buffers)
        self.batched = batched_network(self.network, self._layer_tensors)
        self.forwards: dict[str, Callable[[Tensor, Head], Tensor]] = {
            "batched": self._forward_batched,
            "vmap": self._forward_vmap,
            "sequential": self._forward_sequential,
        }
        self.mode = mode or _mode_of(networks)

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    def __call__(self, x: Tensor, head: Head, *, train: bool = False) -> Tensor:
        """Return the logits, of shape (runs, batch, outputs), or (runs, batch, heads, outputs) of several heads.

        Args:
            x: images of shape (runs, batch, channels, height, width).
            head: one head, or a head for each sample, int64 of shape (runs, batch), or several heads for all samples.
            train: whether the networks are in training mode.
        """
        for network in (self.network, self.batched):
            if network is not None and network.training != train:  # setting it visits every module
                network.train(train)
                if train and self.frozen_norms:
                    _freeze_norms(network)
        with _attention_fastpath_disabled():
            if self.compute_dtype is None:
                return self.forwards[self.mode](x, head)
            with torch.autocast(self.device.type, self.compute_dtype, enabled=self.mode != "batched"):
                return self.forwards[self.mode](x, head).to(x.dtype)

    def freeze_norms(self, frozen: bool) -> None:
        """Make normalization layers use their running statistics in training mode too, or no longer."""
        self.frozen_norms = frozen
        for network in (self.network, self.batched):
            if network is not None:
                network.eval()  # so that the next call sets the mode of every layer

    def _forward_batched(self, x: Tensor, head: Head) -> Tensor:
        assert self.batched is not None
        x = x.flatten(0, 1) if self.compute_dtype is None else x.flatten(0, 1).to(self.compute_dtype)
        logits: Tensor = self.batched(x, head.flatten() if isinstance(head, Tensor) else head)
        return logits.view(len(self), -1, *logits.shape[1:])

    def _layer_tensors(self, name: str) -> tuple[Tensors, int]:
        """Return the current parameters and buffers of one layer, and the number of runs."""
        parameters, buffers = (names.get(name, {}) for names in self.tensor_names)
        own = {short: self.parameters[full] for short, full in parameters.items()}
        return own | {short: self.buffers[full] for short, full in buffers.items()}, len(self)

    def _forward_vmap(self, x: Tensor, head: Head) -> Tensor:
        dims = (0, 0, 0, 0 if isinstance(head, Tensor) else None)
        # on a CPU, vmap would run other attention kernels one by one
        with sdpa_kernel(SDPBackend.MATH) if x.device.type == "cpu" else nullcontext():
            logits: Tensor = vmap(self._forward_one, in_dims=dims)(self.parameters, self.buffers, x, head)
        return logits

    def _forward_one(self, parameters: Tensors, buffers: Tensors, x: Tensor, head: Head) -> Tensor:
        tensors = parameters | buffers
        logits: Tensor = functional_call(self.network, tensors, (x, head))
        for name, buffer in buffers.items():
            if tensors[name] is not buffer:  # the network replaced the buffer
                buffer.copy_(tensors[name].detach())
        return logits

    def _forward_sequential(self, x: Tensor, head: Head) -> Tensor:
        self.calls += self.network.training
        parameters = {name: p.unbind() for name, p in self.parameters.items()}  # one gradient for the whole stack
        logits = []
        for run, seed in enumerate(self.seeds):
            own_parameters = {name: rows[run] for name, rows in parameters.items()}
            with self._rng_preserved():
                torch.manual_seed(seeded_generator(seed, "forward", self.calls).initial_seed())
                own_head = head[run] if isinstance(head, Tensor) else head
                logits.append(self._forward_one(own_parameters, _row(self.buffers, run), x[run], own_head))
        return torch.stack(logits)

    def network_of(self, run: int, replaced: Tensors | None = None) -> MultiHeadNetwork:
        """Return a separate network with the weights of one run.

        Args:
            run: the run's row in the stack.
            replaced: parameters and buffers to use instead of the current ones, stacked the same way.
        """
        network, tensors = deepcopy(self.network), self.parameters | self.buffers | (replaced or {})
        network.load_state_dict({name: tensor.detach()[run] for name, tensor in tensors.items()}, strict=False)
        return network

    def keep(self, rows: Tensor) -> None:
        """Keep only the runs in these rows."""
        self.parameters = {name: to_stack_layout(p.detach()[rows]) for name, p in self.parameters.items()}
        self.buffers = {name: b[rows].contiguous() for name, b in self.buffers.items()}
        self.seeds = [self.seeds[row] for row in rows.tolist()]

    @contextmanager
    def observed_with(self, weights: Tensors, on_forward: ForwardCallback) -> Iterator[None]:
        """Use other weights inside this context, and call back after each layer; for the mode "batched".

        Args:
            weights: parameters and buffers by name, each of shape (runs, ...); the number of runs may differ.
            on_forward: called after the forward pass of each layer.
        """
        modules = () if self.batched is None else self.batched.modules()
        layers = [layer for layer in modules if isinstance(layer, BatchedLayer)]
        before = [layer.on_forward for layer in layers]
        for layer in layers:
            layer.on_forward = on_forward
        try:
            with self.replaced_by(weights):
                yield
        finally:
            for layer, callback in zip(layers, before, strict=True):
                layer.on_forward = callback

    @contextmanager
    def replaced_by(self, weights: Tensors) -> Iterator[None]:
        """Use other weights inside this context: parameters and buffers by name, each of shape (runs, ...)."""
        before = self.parameters, self.buffers
        self.parameters, self.buffers = ({name: weights[name] for name in own} for own in before)
        try:
            yield
        finally:
            self.parameters, self.buffers = before

    @torch.no_grad()
    def inherit(self, head: int, ancestor: int, rows: list[int]) -> None:
        """Copy the head `ancestor` to another head in the runs of these rows."""
        for name, p in self.parameters.items():
            if name.startswith(f"heads.{head}."):
                other = self.parameters[name.replace(f"heads.{head}.", f"heads.{ancestor}.", 1)]
                p[rows] = other[rows]

    def _stack(self, networks: Sequence[dict[str, Any]], rows: Tensor) -> Tensors:
        stacked = {name: torch.stack([own[name].detach() for own in networks]).to(self.device) for name in networks[0]}
        shared = len(networks) < len(rows)
        return {name: to_stack_layout(tensor[rows] if shared else tensor) for name, tensor in stacked.items()}

    def _rng_preserved(self) -> Any:
        """Restore the global random number generators at the end of this context."""
        return torch.random.fork_rng(range(torch.cuda.device_count()))  # torch.manual_seed seeds every device

    def matches_single_networks(self, mode: str) -> bool:
        """Set the mode, and return whether it gives the outputs and buffers of each network alone.

        The comparison uses different random samples for each run, in training and in evaluation mode.
        """
        self.mode = mode
        kept = {name: buffer.clone() for name, buffer in self.buffers.items()}
        pixels = torch.randint(256, (len(self), 8, *self.network.shape), generator=seeded_generator("a try"))
        x = normalize_pixels(pixels, next(iter(self.parameters.values())).dtype).to(self.device)
        heads = torch.arange(len(self) * 8, device=self.device).view(len(self), 8) % len(self.network.heads)
        try:
            return self._matches(x, heads, True, kept) and self._matches(x, 0, False, kept)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return False
        finally:
            self.buffers = kept

    def _matches(self, x: Tensor, head: int | Tensor, train: bool, kept: Tensors) -> bool:
        """Return whether the current mode gives the same logits and buffers, starting from the kept buffers."""
        self.buffers = {name: buffer.clone() for name, buffer in kept.items()}
        logits = self(x, head, train=train)
        differences = []
        for run in range(len(self)):
            buffers = {name: buffer[run].clone() for name, buffer in kept.items()}
            own_head = head[run] if isinstance(head, Tensor) else head
            with _attention_fastpath_disabled():
                expected = self._forward_one(_row(self.parameters, run), buffers, x[run], own_head)
            differences.append(_relative_difference(logits[run], expected))
            differences += [_relative_difference(self.buffers[name][run], buffer) for name, buffer in buffers.items()]
        return max(differences) < MODE_TOLERANCE


def _freeze_norms(network: nn.Module) -> None:
    """Make normalization layers use their running statistics, until the network's mode is set again."""
    for module in network.modules():
        if "running_mean" in (module.layer if isinstance(module, BatchedLayer) else module)._buffers:
            module.train(False)


def _names_by_layer(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the full names of the tensors of each layer by their names in the layer, submodules included."""
    by_layer: dict[str, dict[str, str]] = {}
    for full in names:
        for dot in re.finditer(r"\.", full):
            by_layer.setdefault(full[: dot.start()], {})[full[dot.end() :]] = full
    return by_layer


def _row(tensors: Tensors, run: int) -> Tensors:
    return {name: tensor[run] for name, tensor in tensors.items()}


def _mode_of(networks: Sequence[MultiHeadNetwork]) -> str:
    """Return `fastest_mode`, cached by architecture if all modules are known: other modules may hide settings."""
    if not all(is_standard_layer(module) for module in networks[0].modules()):
        return fastest_mode(networks)
    layers = tuple((name, type(layer), layer.extra_repr()) for name, layer in networks[0].named_modules())
    sizes = tuple((name, t.shape, t.dtype) for name, t in networks[0].state_dict().items())
    key = (len(networks) > 1, networks[0].shape, layers, sizes, frozenset(LAYERS.items()))
    if key not in _MODES:
        _MODES[key] = fastest_mode(networks)
    return _MODES[key]


def fastest_mode(networks: Sequence[MultiHeadNetwork]) -> str:
    """Return the fastest execution mode that gives the outputs of the single networks.

    The modes are compared on the first and the last network, on the CPU and in full precision: correctness does not
    depend on device or precision. Noise is added to both, because networks that start from the same weights would
    agree even if a layer mixed up their runs. What vmap refuses, such as a branch on values, would be wrong in one
    batch of all runs too.

    Example:
        >>> from torch import nn
        >>> backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Dropout())
        >>> fastest_mode([MultiHeadNetwork(backbone, outputs=2, heads=1, shape=(1, 2, 2))])
        'sequential'
    """
    ends = (networks[0], networks[-1])[: len(networks)]
    stack = Stack([_with_noise(network, number) for number, network in enumerate(ends)], mode="sequential")
    with torch.no_grad(), stack._rng_preserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vmap warns about operations that it runs one by one
        if not stack.matches_single_networks("vmap"):
            return "sequential"
        return "batched" if stack.batched is not None and stack.matches_single_networks("batched") else "vmap"


@torch.no_grad()
def _with_noise(network: MultiHeadNetwork, number: int) -> MultiHeadNetwork:
    """Return a copy with noise of the size of its weights; buffers, such as a variance, do not become negative."""
    noisy, random = deepcopy(network).cpu(), seeded_generator("a try", number)
    for p in filter(torch.is_floating_point, noisy.parameters()):
        rms = float(p.square().mean().sqrt()) if p.ndim > 1 else 0.0
        factor, offset = 2 * torch.rand((2, *p.shape), generator=random, dtype=p.dtype) - 1
        p.mul_(1 + 0.3 * factor).add_((0.5 * rms or 0.1) * offset)
    for buffer in filter(torch.is_floating_point, noisy.buffers()):
        factor, offset = torch.rand((2, *buffer.shape), generator=random, dtype=buffer.dtype)
        buffer.mul_(1 + 0.3 * factor).add_(0.1 * offset)
    return noisy


def _relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; infinite if a value is not finite."""
    if torch.equal(actual, expected):
        return 0.0
    difference = float((actual.double() - expected).abs().max() / expected.double().abs().max().clamp(min=1e-30))
    return difference if difference < float("inf") else float("inf")


@contextmanager
def _attention_fastpath_disabled() -> Iterator[None]:
    """Disable torch's attention fast path for inference: it reads the weights of one network."""
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


def to_stack_layout(tensor: Tensor) -> Tensor:
    """Return a stacked tensor in its memory layout: contiguous, but convolution weights on a GPU with channels last.

    Example:
        >>> to_stack_layout(torch.zeros(2, 3).t()).is_contiguous()
        True
    """
    if tensor.ndim == 5 and tensor.is_cuda:
        return tensor.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return tensor.contiguous()


def flatten_per_run(tensor: Tensor) -> Tensor:
    """View (runs, ...) as (runs, elements), in the memory order of `to_stack_layout`; never a copy.

    Example:
        >>> flatten_per_run(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 12])
    """
    if tensor.ndim == 5 and tensor.is_cuda:
        tensor = tensor.permute(0, 1, 3, 4, 2)
    return tensor.view(len(tensor), -1)
