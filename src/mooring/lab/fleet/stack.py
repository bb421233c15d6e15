"""One network, many sets of weights: the forward pass of every run of a fleet at once."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from mooring.lab.fleet.layers import widened
from mooring.lab.networks.headed import Headed
from mooring.lab.order import generator

__all__ = ["Stack", "laid_out"]

Tensors = dict[str, Tensor]


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

    Attributes:
        parameters: by name, each of shape (runs, ...).
        buffers: by name, each of shape (runs, ...).
        way: "wide", "vmap" or "in turn".

    Example:
        >>> from torch import nn
        >>> stack = Stack([Headed(nn.Flatten(), outputs=2, heads=1, shape=(1, 2, 2)) for _ in range(3)])
        >>> stack(torch.zeros(3, 5, 1, 2, 2), head=0).shape
        torch.Size([3, 5, 2])
    """

    def __init__(
        self,
        networks: Sequence[Headed],
        device: torch.device | str = "cpu",
        seeds: Sequence[int] = (),
        products: torch.dtype | None = None,
    ) -> None:
        self.products = products
        self.device = torch.device(device)
        self.network = deepcopy(networks[0]).to(self.device)
        self.parameters = self._stacked([dict(network.named_parameters()) for network in networks])
        self.buffers = self._stacked([dict(network.named_buffers()) for network in networks])
        self.seeds = list(seeds) or [0] * len(networks)
        self.calls = 0
        self.members = self._members()
        self.wide = widened(self.network, self._layer)
        self.ways: dict[str, Callable[[Tensor, int | Tensor], Tensor]] = {
            "wide": self._wide,
            "vmap": self._vmapped,
            "in turn": self._in_turn,
        }
        self.way = self._fastest()

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
        parameters, buffers = self.members[name]
        own = {short: self.parameters[full] for short, full in parameters}
        return own | {short: self.buffers[full] for short, full in buffers}, len(self)

    def _members(self) -> dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]]:
        """For each layer, the short and the full names of its parameters and of its buffers."""
        found: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {}
        for place, tensors in enumerate((self.parameters, self.buffers)):
            for full in tensors:
                owner, _, short = full.rpartition(".")
                found.setdefault(owner, ([], []))[place].append((short, full))
        return found

    def _vmapped(self, x: Tensor, head: int | Tensor) -> Tensor:
        dims = (0, 0, 0, None if isinstance(head, int) else 0)
        logits: Tensor = vmap(self._one, in_dims=dims)(self.parameters, self.buffers, x, head)
        return logits

    def _one(self, parameters: Tensors, buffers: Tensors, x: Tensor, head: int | Tensor) -> Tensor:
        logits: Tensor = functional_call(self.network, (parameters, buffers), (x, head))
        return logits

    def _in_turn(self, x: Tensor, head: int | Tensor) -> Tensor:
        self.calls += self.network.training
        parameters = {name: p.unbind() for name, p in self.parameters.items()}  # one gradient for the whole stack
        logits = []
        for run, seed in enumerate(self.seeds):
            mine = {name: each[run] for name, each in parameters.items()}
            with torch.random.fork_rng():
                torch.manual_seed(generator(seed, "forward", self.calls).initial_seed())
                own = head if isinstance(head, int) else head[run]
                logits.append(self._one(mine, self._of(self.buffers, run), x[run], own))
        return torch.stack(logits)

    def alone(self, run: int, others: Tensors | None = None) -> Headed:
        """A network of its own with the weights of one run.

        Args:
            run: its place in the stack.
            others: other parameters and buffers than the present ones, stacked the same way.
        """
        network = deepcopy(self.network)
        told = self._of(self.parameters | self.buffers | (others or {}), run)
        network.load_state_dict({name: tensor.detach() for name, tensor in told.items()}, strict=False)
        return network

    def keep(self, rows: Tensor) -> None:
        """Go on with these runs only."""
        self.parameters = {name: laid_out(p.detach()[rows]) for name, p in self.parameters.items()}
        self.buffers = {name: b[rows].contiguous() for name, b in self.buffers.items()}
        self.seeds = [self.seeds[row] for row in rows.tolist()]

    @torch.no_grad()
    def inherit(self, head: int, ancestor: int) -> None:
        """Start a head of every run from another of its heads."""
        for name, p in self.parameters.items():
            if name.startswith(f"heads.{head}."):
                p.copy_(self.parameters[name.replace(f"heads.{head}.", f"heads.{ancestor}.", 1)])

    def _stacked(self, each: Sequence[dict[str, Any]]) -> Tensors:
        stacked = {name: torch.stack([told[name].detach() for told in each]).to(self.device) for name in each[0]}
        return {name: laid_out(tensor) for name, tensor in stacked.items()}

    def _of(self, tensors: Tensors, run: int) -> Tensors:
        return {name: tensor[run] for name, tensor in tensors.items()}

    def _fastest(self) -> str:
        """The first way that gives what the networks give alone; each is tried on noise, and what it did is undone.

        Whatever vmap refuses, such as a branch on values, would be wrong in one wide batch too.
        """
        kept = {name: buffer.clone() for name, buffer in self.buffers.items()}
        with torch.no_grad(), torch.random.fork_rng():
            agree = [way for way in ("vmap", "wide") if self._agrees(way, kept)]
        for name, buffer in kept.items():
            self.buffers[name].copy_(buffer)
        return agree[-1] if "vmap" in agree else "in turn"

    def _agrees(self, way: str, kept: Tensors) -> bool:
        """Whether a way gives what the first and the last network give alone, each on samples of its own."""
        dtype = next(iter(self.parameters.values())).dtype
        noise = torch.randn(len(self), 3, *self.network.shape, generator=generator("a try")).to(self.device, dtype)
        heads = torch.zeros(len(self), 3, dtype=torch.int64, device=self.device)
        tries: tuple[tuple[bool, int | Tensor], ...] = ((True, heads), (False, 0))
        try:
            for train, head in tries:
                self._mode(train)
                found = self.ways[way](noise, head)
                for row in {0, len(self) - 1}:
                    own = head if isinstance(head, int) else head[row]
                    buffers = {name: buffer[row].clone() for name, buffer in kept.items()}
                    alone = self._one(self._of(self.parameters, row), buffers, noise[row], own)
                    apart = float((found[row].to(dtype) - alone).abs().max() / alone.abs().max())
                    if not apart < (0.01 if self.products is None else 0.1):
                        return False
                for name, buffer in kept.items():
                    self.buffers[name].copy_(buffer)
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError):
            return False
        return True


def laid_out(tensor: Tensor) -> Tensor:
    """A stacked tensor as it should lie in memory: kernels of convolutions on a GPU with their channels last.

    Example:
        >>> laid_out(torch.zeros(2, 3).t()).is_contiguous()
        True
    """
    if tensor.ndim == 5 and tensor.is_cuda:
        return tensor.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    return tensor.contiguous()
