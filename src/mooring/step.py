"""One training step of a moored model, from top to bottom: Algorithm 1 of the paper in an optimizer's hooks."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from mooring.checkpoint import Moored
from mooring.errors import MooringError, NonFiniteError
from mooring.finite import check_finite
from mooring.importance import Iteration, State
from mooring.ledger import Ledger
from mooring.pulls import GradientPull, ParameterPull, Pull
from mooring.runs import Number
from mooring.selection import layer_of, norm_buffers
from mooring.tiles import tiles
from mooring.watch import Seen, Watch

__all__ = ["TrainingStep"]

Due = list[tuple[Moored, Number, Tensor]]
"""The parameters of a step that have a gradient: their record, learning rate and the task's own gradient."""


class TrainingStep:
    """What happens around `optimizer.step()`.

    Args:
        ledger: the records of the moored parameters.
        pull: draws them back.
        watch: sees the model's outputs, where the importance needs them.
        buffers: what becomes of normalisation statistics: "follow", "keep" or "interpolate".
        check: whether to stop at gradients that are not finite.
    """

    def __init__(
        self,
        ledger: Ledger,
        pull: Pull,
        watch: Watch | None,
        buffers: Literal["follow", "keep", "interpolate"],
        check: bool,
    ) -> None:
        self.ledger = ledger
        self.importance = ledger.importance
        self.pull = pull
        self.watch = watch
        self.buffers = buffers
        self.check = check
        self.buffer_anchors: State = {}
        self._due: Due = []
        self._seen = Seen()
        self._laden: list[tuple[Tensor, Tensor]] = []
        self._before: dict[Tensor, Tensor] = {}

    @property
    def interrupted(self) -> bool:
        """Whether the optimizer stopped half-way, so that what is kept is not consistent."""
        return bool(self._before)

    # Before the optimizer's step

    def before(
        self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """The optimizer's pre-hook. With a closure, the gradient is there only after the closure ran."""
        self._due = []
        self.unload()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._prepare(optimizer)
            return None
        evaluated = False

        def once() -> Any:
            nonlocal evaluated
            if evaluated:
                raise MooringError("the optimizer evaluates its closure several times in a step and cannot be moored")
            evaluated = True
            loss = closure()
            if self.check and isinstance(loss, Tensor) and not bool(loss.isfinite().all()):
                value = loss.detach().mean().item()
                raise NonFiniteError(
                    f"the loss is {value}; nothing was changed: lower the learning rate or the strength"
                )
            self._prepare(optimizer)
            return loss

        return (args[0], once, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    @torch.no_grad()
    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Collect the task's gradients, check them, put a penalty on top, and remember where parameters are."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):  # a fused kernel is about to skip this step
            if self.watch:
                self.watch.forget()
            return
        scale = getattr(optimizer, "grad_scale", None)  # and divides by this otherwise
        due: Due = []
        for group in optimizer.param_groups:
            lr = group.get("lr", 1.0)  # an optimizer without one moves by the gradient itself
            for p in group["params"]:
                if p.grad is not None and (m := self.ledger.adopt(p)):
                    due.append((m, lr, self._task_gradient(optimizer, p.grad, m, scale)))
        if not due:
            return
        seen = self.watch.take() if self.watch else Seen()
        if self.check:
            probes = [(m.name, t) for m, _, _ in due if (t := seen.of(m.parameter)) is not None]
            check_finite("importance gradient", probes)
        self._load(due, scale)
        if self.importance.needs_step:
            self._before = {m.parameter: self._copy(m) for m, _, _ in due}
        self._due, self._seen = due, seen

    def _task_gradient(self, optimizer: torch.optim.Optimizer, grad: Tensor, m: Moored, scale: Tensor | None) -> Tensor:
        """The gradient of the task's loss as it will still be there after the step."""
        if scale is not None:
            return grad.to(m.wide) / scale
        penalized = isinstance(self.pull, GradientPull) and m.previous is not None  # the step works on another tensor
        own = type(optimizer).__module__.startswith("torch.optim.")  # torch's optimizers do not write to gradients
        return grad if own or penalized else grad.clone()

    def _load(self, due: Due, scale: Tensor | None) -> None:
        """g <- g + force, in a gradient of its own, so that the task's can be put back after the step."""
        laden: list[tuple[Moored, Tensor]] = []
        if isinstance(self.pull, GradientPull):
            for m, lr, g in due:
                if m.previous is not None:
                    laden.append((m, self._penalized(self.pull, m, lr, g, scale)))
        if self.check:
            try:
                loads = {m.name: load for m, load in laden}
                check_finite("penalized gradient", [(m.name, loads.get(m.name, g)) for m, _, g in due])
            except NonFiniteError:
                check_finite("gradient", [(m.name, g) for m, _, g in due])  # it need not be the penalty's fault
                raise
        task_gradients = {m.parameter: g for m, _, g in due}
        for m, load in laden:
            p = m.parameter
            assert p.grad is not None
            self._laden.append((p, p.grad if scale is None else p.grad.copy_(task_gradients[p])))  # as the kernel does
            p.grad = load

    def _penalized(self, pull: GradientPull, m: Moored, lr: Number, g: Tensor, scale: Tensor | None) -> Tensor:
        assert m.previous is not None
        load = torch.empty_like(m.parameter)
        for theta, anchor, previous, g_piece, piece in tiles([m.parameter, m.anchor, m.previous, g, load]):
            force = pull.force(previous.to(m.wide), theta.to(m.wide) - anchor, lr)
            if scale is None and force.dtype == piece.dtype:
                torch.add(g_piece, force, out=piece)
            else:
                piece.copy_((g_piece + force) * (1 if scale is None else scale))
        return load

    def _copy(self, m: Moored) -> Tensor:
        """The parameter before the step, kept in the memory of `current`, which is computed anew after it."""
        current = m.state["current"]
        if torch.promote_types(current.dtype, m.parameter.dtype) != current.dtype:
            return m.parameter.detach().clone()
        return current.copy_(m.parameter)

    # After the optimizer's step

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
        """The optimizer's post-hook: update the importance, then pull."""
        self.unload()
        if not self._due:
            return
        self.ledger.steps += 1
        pull = self.pull if isinstance(self.pull, ParameterPull) and self.ledger.steps % self.pull.every == 0 else None
        balanced = self.importance.balances
        for m, lr, g in self._due:
            counts = self.importance.watches != "outputs" or self._seen.of(m.parameter) is not None
            m.count += counts
            for piece in self._pieces(m, g):
                if counts:  # the outputs depend on this parameter, where they matter
                    self._update_importance(m, piece)
                if pull and not balanced:
                    pull_back(pull, m, piece, lr)
        if pull and balanced:
            factors = self.ledger.factors()
            for m, lr, g in self._due:
                for piece in self._pieces(m, g):
                    piece["current"] = piece["current"] * factors[layer_of(m.name)]
                    pull_back(pull, m, piece, lr)
        self._before = {}
        self._hold_buffers()
        self._due, self._seen = [], Seen()

    def unload(self) -> None:
        """Give the parameters their task's gradient back."""
        for parameter, gradient in self._laden:
            parameter.grad = gradient
        self._laden = []

    def _pieces(self, m: Moored, g: Tensor) -> Iterator[State]:
        """Everything about a parameter by name, in aligned pieces that stay in the cache from first to last use."""
        before, probe = self._before.get(m.parameter), self._seen.of(m.parameter)
        extra = {"previous": m.previous, "before": before, "probe": probe}
        named = {"theta": m.parameter, "anchor": m.anchor, "g": g, **m.state}
        named |= {key: tensor for key, tensor in extra.items() if tensor is not None}
        for pieces in tiles(list(named.values())):
            yield dict(zip(named, pieces, strict=True))

    def _update_importance(self, m: Moored, piece: State) -> None:
        named = ("g", "theta", "anchor", "before", "probe")
        wide = {key: piece[key].to(m.wide) for key in named if key in piece}
        state = {slot: piece[slot].to(m.wide) if piece[slot].is_floating_point() else piece[slot] for slot in m.state}
        self.importance.update(state, Iteration(**wide, samples=self._seen.samples, count=m.count))
        for slot, tensor in state.items():
            if tensor is not piece[slot]:  # kept in a narrower dtype
                piece[slot].copy_(tensor)

    # Normalisation statistics

    def anchor_buffers(self) -> None:
        """A task ends: remember the statistics as they are, where they are to be held."""
        if self.buffers != "follow":
            self.buffer_anchors = {name: buffer.clone() for name, buffer in self._norm_buffers().items()}

    def _norm_buffers(self) -> State:
        return norm_buffers(self.ledger.model, self.ledger.trained())

    def _hold_buffers(self) -> None:
        """Keep the statistics, or bring them half-way back (R at equal importance)."""
        if self.buffer_anchors:
            weight = 1.0 if self.buffers == "keep" else 0.5
            for name, buffer in self._norm_buffers().items():
                if name in self.buffer_anchors:
                    buffer.lerp_(self.buffer_anchors[name], weight)


def pull_back(pull: ParameterPull, m: Moored, piece: State, lr: Number) -> None:
    """theta <- theta + rate * (anchor - theta), as a lerp, which never leaves the interval."""
    if "previous" not in piece:
        return  # nothing is known of the past
    theta, anchor = piece["theta"], piece["anchor"].to(m.wide)
    rate = pull.rate(piece["previous"].to(m.wide), piece["current"].to(m.wide), lr).to(m.wide)
    if theta.dtype == m.wide:
        theta.lerp_(anchor, rate)
    else:
        theta.copy_(torch.lerp(theta.to(m.wide), anchor, rate))
