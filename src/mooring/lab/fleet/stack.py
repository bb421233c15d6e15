"""One network, many sets of weights: the forward pass of every run of a fleet at once."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from mooring.lab.networks.headed import Headed
from mooring.lab.order import generator

__all__ = ["Stack"]

Tensors = dict[str, Tensor]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Stack:
    """The weights of several networks of one shape, each parameter and buffer with a leading run axis.

    Networks are stacked with `torch.func.vmap`. Convolutions on a CPU, which are faster alone than grouped, and what
    cannot be stacked (a forward pass that branches on values, or that draws random numbers) run one network after the
    other, each with random numbers of its own.

    Args:
        networks: one for each run.
        device: where to compute.
        seeds: what each network's own random numbers begin from, where its forward pass draws any.

    Attributes:
        parameters: by name, each of shape (runs, ...).
        buffers: by name, each of shape (runs, ...).
        stackable: whether vmap takes the network.
        together: whether the networks are stacked; False where they run one after the other.

    Example:
        >>> from torch import nn
        >>> stack = Stack([Headed(nn.Flatten(), outputs=2, heads=1, shape=(1, 2, 2)) for _ in range(3)])
        >>> stack(torch.zeros(3, 5, 1, 2, 2), head=0).shape
        torch.Size([3, 5, 2])
    """

    def __init__(
        self, networks: Sequence[Headed], device: torch.device | str = "cpu", seeds: Sequence[int] = ()
    ) -> None:
        self.device = torch.device(device)
        self.network = deepcopy(networks[0]).to(self.device)
        self.parameters = self._stacked([dict(network.named_parameters()) for network in networks])
        self.buffers = self._stacked([dict(network.named_buffers()) for network in networks])
        self.seeds = list(seeds) or [0] * len(networks)
        self.calls = 0
        self.stackable = self._can_stack(networks[0])
        convolves = any(isinstance(module, CONVOLUTIONS) for module in self.network.modules())
        self.together = self.stackable and not (convolves and self.device.type == "cpu")

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    def __call__(self, x: Tensor, head: int | Tensor, *, train: bool = False) -> Tensor:
        """Logits of shape (runs, batch, outputs).

        Args:
            x: images of shape (runs, batch, channels, height, width).
            head: one head, or a head for each sample, int64 of shape (runs, batch).
            train: whether layers that behave differently in training do.
        """
        self.network.train(train)
        return self._together(x, head) if self.together else self._in_turn(x, head)

    def _together(self, x: Tensor, head: int | Tensor) -> Tensor:
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
        self.parameters = {name: p.detach()[rows].contiguous() for name, p in self.parameters.items()}
        self.buffers = {name: b[rows].contiguous() for name, b in self.buffers.items()}
        self.seeds = [self.seeds[row] for row in rows.tolist()]

    @torch.no_grad()
    def inherit(self, head: int, ancestor: int) -> None:
        """Start a head of every run from another of its heads."""
        for name, p in self.parameters.items():
            if name.startswith(f"heads.{head}."):
                p.copy_(self.parameters[name.replace(f"heads.{head}.", f"heads.{ancestor}.", 1)])

    def _stacked(self, each: Sequence[dict[str, Any]]) -> Tensors:
        return {name: torch.stack([told[name].detach() for told in each]).to(self.device) for name in each[0]}

    def _of(self, tensors: Tensors, run: int) -> Tensors:
        return {name: tensor[run] for name, tensor in tensors.items()}

    def _can_stack(self, network: Headed) -> bool:
        """Whether vmap takes the network, in training as in scoring, tried on black images and then undone."""
        dtype = next(iter(self.parameters.values())).dtype
        x = torch.zeros(len(self), 2, *network.shape, dtype=dtype, device=self.device)
        kept = {name: buffer.clone() for name, buffer in self.buffers.items()}
        heads = torch.zeros(len(self), 2, dtype=torch.int64, device=self.device)
        try:
            with torch.no_grad():
                self.network.train()
                self._together(x, heads)
                self.network.eval()
                self._together(x, 0)
                return True
        except (RuntimeError, ValueError, TypeError):
            return False
        finally:
            for name, buffer in kept.items():
                self.buffers[name].copy_(buffer)
