"""One network, many sets of weights: the forward pass of every run of a fleet at once."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.backends import mha
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from mooring.lab.fleet.stack.batched_layers import LAYERS, Watcher, Wide, widened
from mooring.lab.model.order import seeded_generator
from mooring.lab.networks.inputs import normalize_pixels
from mooring.lab.networks.multi_head import MultiHeadNetwork, is_standard_layer

__all__ = ["Stack", "fastest", "flat", "laid_out"]

Tensors = dict[str, Tensor]

NEAR = 0.001
"""How far from what a network gives alone a way may be, relative to it: sums are taken in another order."""

_WAYS: dict[tuple[object, ...], str] = {}
"""What `fastest` found, by architecture."""


class Stack:
    """The weights of several networks of one shape, each parameter and buffer with a leading run axis.

    There are three ways to run them, and the first that gives what the networks give alone is taken. "wide": the
    network's own forward pass on all samples as one batch, with layers that know about runs. "vmap": `torch.func.vmap`,
    for networks with other layers. "in turn": one network after the other, each with random numbers of its own, for
    forward passes that branch on values or draw random numbers.

    Args:
        networks: one for each run.
        device: where to compute.
        seeds: what each network's own random numbers begin from, where its forward pass draws any.
        products: the dtype of products in the forward pass, where it is not the parameters' own.
        way: one of the three, where it is known; found by trying if not.

    Attributes:
        parameters: by name, each of shape (runs, ...).
        buffers: by name, each of shape (runs, ...).
        way: "wide", "vmap" or "in turn".

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
        products: torch.dtype | None = None,
        way: str = "",
    ) -> None:
        self.products = products
        self.device = torch.device(device)
        self.network = deepcopy(networks[0]).to(self.device)
        different = {id(network): network for network in networks}  # many runs may start from one
        places = torch.tensor([list(different).index(id(network)) for network in networks], device=self.device)
        self.parameters = self._stacked([dict(network.named_parameters()) for network in different.values()], places)
        self.buffers = self._stacked([dict(network.named_buffers()) for network in different.values()], places)
        self.seeds = list(seeds) or [0] * len(networks)
        self.calls = 0
        self.members = self._members()
        self.wide = widened(self.network, self._layer)
        self.ways: dict[str, Callable[[Tensor, int | Tensor], Tensor]] = {
            "wide": self._wide,
            "vmap": self._vmapped,
            "in turn": self._in_turn,
        }
        self.way = way or _way_of(networks)

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    def __call__(self, x: Tensor, head: int | Tensor, *, train: bool = False) -> Tensor:
        """Logits of shape (runs, batch, outputs).

        Args:
            x: images of shape (runs, batch, channels, height, width).
            head: one head, or a head for each sample, int64 of shape (runs, batch).
            train: whether layers that behave differently in training do.
        """
        self._mode(train)
        with _plain_attention():
            if self.products is None:
                return self.ways[self.way](x, head)
            with torch.autocast(self.device.type, self.products, enabled=self.way != "wide"):
                return self.ways[self.way](x, head).to(x.dtype)

    def _mode(self, train: bool) -> None:
        """Tell the networks, where they are not in that mode already: it takes a walk over all modules."""
        for network in (self.network, self.wide):
            if network is not None and network.training != train:
                network.train(train)

    def _wide(self, x: Tensor, head: int | Tensor) -> Tensor:
        assert self.wide is not None
        x = x.flatten(0, 1) if self.products is None else x.flatten(0, 1).to(self.products)
        logits: Tensor = self.wide(x, head if isinstance(head, int) else head.flatten())
        return logits.view(len(self), -1, *logits.shape[1:])

    def _layer(self, name: str) -> tuple[Tensors, int]:
        """The parameters and buffers of one layer, as they are now."""
        parameters, buffers = self.members.get(name, ([], []))
        own = {short: self.parameters[full] for short, full in parameters}
        return own | {short: self.buffers[full] for short, full in buffers}, len(self)

    def _members(self) -> dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
        """For each layer, the short and the full names of its parameters and of its buffers, and of its parts'."""
        found: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {}
        for place, tensors in enumerate((self.parameters, self.buffers)):
            for full in tensors:
                parts = full.split(".")
                for cut in range(1, len(parts)):
                    owner, short = ".".join(parts[:cut]), ".".join(parts[cut:])
                    found.setdefault(owner, ([], []))[place].append((short, full))
        return found

    def _vmapped(self, x: Tensor, head: int | Tensor) -> Tensor:
        dims = (0, 0, 0, None if isinstance(head, int) else 0)
        with sdpa_kernel(SDPBackend.MATH) if x.device.type == "cpu" else nullcontext():  # others go one by one
            logits: Tensor = vmap(self._one, in_dims=dims)(self.parameters, self.buffers, x, head)
        return logits

    def _one(self, parameters: Tensors, buffers: Tensors, x: Tensor, head: int | Tensor) -> Tensor:
        told = parameters | buffers
        logits: Tensor = functional_call(self.network, told, (x, head))
        for name, buffer in buffers.items():
            if told[name] is not buffer:  # the network put another in its place
                buffer.copy_(told[name].detach())
        return logits

    def _in_turn(self, x: Tensor, head: int | Tensor) -> Tensor:
        self.calls += self.network.training
        parameters = {name: p.unbind() for name, p in self.parameters.items()}  # one gradient for the whole stack
        logits = []
        for run, seed in enumerate(self.seeds):
            mine = {name: each[run] for name, each in parameters.items()}
            with self._own_random():
                torch.manual_seed(seeded_generator(seed, "forward", self.calls).initial_seed())
                own = head if isinstance(head, int) else head[run]
                logits.append(self._one(mine, self._of(self.buffers, run), x[run], own))
        return torch.stack(logits)

    def alone(self, run: int, others: Tensors | None = None) -> MultiHeadNetwork:
        """A network of its own with the weights of one run.

        Args:
            run: its place in the stack.
            others: other parameters and buffers than the present ones, stacked the same way.
        """
        network = deepcopy(self.network)
        self.fill(network, run, others)
        return network

    def fill(self, network: MultiHeadNetwork, run: int, others: Tensors | None = None) -> None:
        """Give a network the weights of one run; arguments as for `alone`."""
        told = self._of(self.parameters | self.buffers | (others or {}), run)
        network.load_state_dict({name: tensor.detach() for name, tensor in told.items()}, strict=False)

    def keep(self, rows: Tensor) -> None:
        """Go on with these runs only."""
        self.parameters = {name: laid_out(p.detach()[rows]) for name, p in self.parameters.items()}
        self.buffers = {name: b[rows].contiguous() for name, b in self.buffers.items()}
        self.seeds = [self.seeds[row] for row in rows.tolist()]

    @contextmanager
    def showing(self, weights: Tensors, look: Callable[[str, Any, int], None]) -> Iterator[None]:
        """While this lasts, these are the weights, and of every layer is told what it gives; for the way "wide".

        Args:
            weights: parameters and buffers by name, each of shape (runs, ...); other runs, or as many as fit.
            look: told a layer's name, what it gave, and the number of runs.
        """
        layers = [layer for layer in self.wide.modules() if isinstance(layer, Wide)] if self.wide is not None else []
        before = self.parameters, self.buffers, [layer.watcher for layer in layers]
        self.parameters = {name: weights[name] for name in self.parameters}
        self.buffers = {name: weights[name] for name in self.buffers}
        for layer in layers:
            layer.watcher = _telling(look, layer.name)
        try:
            yield
        finally:
            self.parameters, self.buffers, watchers = before
            for layer, watcher in zip(layers, watchers, strict=True):
                layer.watcher = watcher

    @torch.no_grad()
    def inherit(self, head: int, ancestor: int, rows: Tensor | None = None) -> None:
        """Start a head of every run, or of the runs in these rows, from another of its heads."""
        for name, p in self.parameters.items():
            if name.startswith(f"heads.{head}."):
                other = self.parameters[name.replace(f"heads.{head}.", f"heads.{ancestor}.", 1)]
                if rows is None:
                    p.copy_(other)
                else:
                    p[rows] = other[rows]

    def _stacked(self, each: Sequence[dict[str, Any]], places: Tensor) -> Tensors:
        stacked = {name: torch.stack([told[name].detach() for told in each]).to(self.device) for name in each[0]}
        shared = len(each) < len(places)
        return {name: laid_out(tensor[places] if shared else tensor) for name, tensor in stacked.items()}

    def _of(self, tensors: Tensors, run: int) -> Tensors:
        return {name: tensor[run] for name, tensor in tensors.items()}

    def _own_random(self) -> Any:
        """Global random numbers are as they were after this."""
        return torch.random.fork_rng(range(torch.cuda.device_count()))  # a seed goes to every device

    def agrees(self, way: str) -> bool:
        """Whether a way gives what each network gives alone on samples of its own, in training and in use."""
        self.way = way
        kept = {name: buffer.clone() for name, buffer in self.buffers.items()}
        shape = (len(self), 8, *self.network.shape)
        x = normalize_pixels(torch.randint(256, shape, generator=seeded_generator("a try")), self._dtype()).to(
            self.device
        )
        heads = torch.arange(len(self) * 8, device=self.device).view(len(self), 8) % len(self.network.heads)
        tries: tuple[tuple[bool, int | Tensor], ...] = ((True, heads), (False, 0))
        try:
            return all(self._agrees(x, head, train, kept) for train, head in tries)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            return False
        finally:
            self.buffers = kept

    def _agrees(self, x: Tensor, head: int | Tensor, train: bool, kept: Tensors) -> bool:
        """Whether the present way gives the same logits and leaves the same buffers, from the ones that were kept."""
        self.buffers = {name: buffer.clone() for name, buffer in kept.items()}
        logits = self(x, head, train=train)
        apart = []
        for run in range(len(self)):
            buffers = {name: buffer[run].clone() for name, buffer in kept.items()}
            own = head if isinstance(head, int) else head[run]
            with _plain_attention():
                alone = self._one(self._of(self.parameters, run), buffers, x[run], own)
            apart.append(_apart(logits[run], alone))
            apart += [_apart(self.buffers[name][run], buffer) for name, buffer in buffers.items()]
        return max(apart) < NEAR

    def _dtype(self) -> torch.dtype:
        return next(iter(self.parameters.values())).dtype


def _telling(look: Callable[[str, Any, int], None], name: str) -> Watcher:
    return lambda layer, inputs, out, runs: look(name, out, runs)


def _way_of(networks: Sequence[MultiHeadNetwork]) -> str:
    """What `fastest` finds, tried once for each architecture that its layers tell: those of others may hide more."""
    if not all(is_standard_layer(module) for module in networks[0].modules()):
        return fastest(networks)
    layers = tuple((name, type(layer), layer.extra_repr()) for name, layer in networks[0].named_modules())
    sizes = tuple((name, t.shape, t.dtype) for name, t in networks[0].state_dict().items())
    key = (len(networks) > 1, networks[0].shape, layers, sizes, frozenset(LAYERS.items()))
    if key not in _WAYS:
        _WAYS[key] = fastest(networks)
    return _WAYS[key]


def fastest(networks: Sequence[MultiHeadNetwork]) -> str:
    """The first way that gives what networks give alone: tried on the first and the last, with noise on both.

    It is tried on the CPU, in full precision: what is right does not depend on where or how exactly it is computed.
    Networks that start from the same weights would agree whichever of them a layer took for which. Whatever vmap
    refuses, such as a branch on values, would be wrong in one wide batch too.

    Example:
        >>> from torch import nn
        >>> backbone = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Dropout())
        >>> fastest([MultiHeadNetwork(backbone, outputs=2, heads=1, shape=(1, 2, 2))])
        'in turn'
    """
    ends = (networks[0], networks[-1])[: len(networks)]
    few = Stack([_noisy(each, number) for number, each in enumerate(ends)], way="in turn")
    with torch.no_grad(), few._own_random(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vmap, about what it does one by one
        if not few.agrees("vmap"):
            return "in turn"
        return "wide" if few.wide is not None and few.agrees("wide") else "vmap"


@torch.no_grad()
def _noisy(network: MultiHeadNetwork, number: int) -> MultiHeadNetwork:
    """A copy that is like no other, and no wilder; buffers, such as a variance, do not go below 0."""
    noisy, random = deepcopy(network).cpu(), seeded_generator("a try", number)
    for p in filter(torch.is_floating_point, noisy.parameters()):
        usual = float(p.square().mean().sqrt()) if p.ndim > 1 else 0.0
        much, more = 2 * torch.rand((2, *p.shape), generator=random, dtype=p.dtype) - 1
        p.mul_(1 + 0.3 * much).add_((0.5 * usual or 0.1) * more)
    for buffer in filter(torch.is_floating_point, noisy.buffers()):
        much, more = torch.rand((2, *buffer.shape), generator=random, dtype=buffer.dtype)
        buffer.mul_(1 + 0.3 * much).add_(0.1 * more)
    return noisy


def _apart(one: Tensor, other: Tensor) -> float:
    """How far one is from the other, relative to the other; what is not a number is far away."""
    if torch.equal(one, other):
        return 0.0
    apart = float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))
    return apart if apart < float("inf") else float("inf")


@contextmanager
def _plain_attention() -> Iterator[None]:
    """While this lasts, attention is written out: torch's short cut for inference reads weights of one network."""
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


def laid_out(tensor: Tensor) -> Tensor:
    """A stacked tensor as it should lie in memory: kernels of convolutions on a GPU with their channels last.

    Example:
        >>> laid_out(torch.zeros(2, 3).t()).is_contiguous()
        True
    """
    if tensor.ndim == 5 and tensor.is_cuda:
        return tensor.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return tensor.contiguous()


def flat(tensor: Tensor) -> Tensor:
    """(runs, ...) as (runs, elements) in the order of memory, where kernels have their channels last; never a copy.

    Example:
        >>> flat(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 12])
    """
    if tensor.ndim == 5 and tensor.is_cuda:
        tensor = tensor.permute(0, 1, 3, 4, 2)
    return tensor.view(len(tensor), -1)
