"""The table of the states of a model's moored parameters, `MooringState`."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from mooring.curvature.kronecker_factors import (
    FACTOR_SLOTS,
    KroneckerFactors,
    diagonal_reasons,
    layer_groups,
    layers_with_factors,
)
from mooring.curvature.low_rank import Product, Products, by_parameters, find_products
from mooring.curvature.product_factors import ProductFactors
from mooring.distributed.dtensor import local_part, local_tensor, sharded, to_dtensor
from mooring.errors import MooringError, UnheldWarning, first_and_count, warn
from mooring.rules import Importance, State
from mooring.rules.merges import Merge
from mooring.state.consolidation import consolidate, move_anchors
from mooring.state.memory import Memory
from mooring.state.offload import AnchorOffload
from mooring.state.parameter_state import ParameterState, compute_dtype_of, keeps_rows
from mooring.state.selection import module_names, moorable

PREVIOUS_SLOTS = {"previous", "previous_high", "previous_step"}
"""The names under which the importance over past tasks is saved."""

RESERVED_SLOTS = {"anchor", "before", "buffer", "g", "probe", "theta", *PREVIOUS_SLOTS, *FACTOR_SLOTS}
"""Names that the tensors of an importance may not have."""

APPEARED = "appeared after the last task was consolidated"
REPLACED = "replaced a parameter of the same name after the last task was consolidated"
RESHAPED = "changed its shape after the last task was consolidated"
NOT_TRAINED = "did not train before the last task was consolidated"
NOT_ESTIMATED = "did not train when importance was estimated"
"""Why nothing holds a parameter whose state begins after a task was consolidated."""

NOT_OBSERVED = "no call of its layer was observed: call the layer itself, layer(x), and attach before torch.compile"
"""Why a layer has no factors."""

ONE_GRAPH = "is held by its own value, because torch.compile(fullgraph=True) does not allow to observe its layer"

PRODUCT_EVERY = 64
"""Training observes the layers of low-rank products in iterations 0, 1, 2, 4, 8 ... of a task and in each of these."""


class MooringState:
    """The states of a model's moored parameters; each is created when the parameter gets its first gradient.

    Args:
        model: the model.
        optimizer: the optimizer that trains (some of) its parameters.
        importance: the importance of a task.
        merge: how a finished task joins the past.
        exclude: patterns of parameters that stay free, checked.
        memory: the form and place of what is kept.
        adapters: how low-rank adapters are held through their product; otherwise, why by their own parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        importance: Importance,
        merge: Merge,
        exclude: tuple[str, ...],
        memory: Memory,
        adapters: Product | str,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.importance = importance
        self.merge = merge
        self.exclude = exclude
        self.memory = memory
        self.adapters = adapters
        self.products = Products()
        self.observed_every = importance.every if importance.by_layer else PRODUCT_EVERY
        self.merged_products: dict[str, ProductFactors] = {}  # of adapters that left the model, by layer
        self.offload = AnchorOffload(memory.staging) if memory.host else None
        self.copies_anchors = True  # not in an estimate, in which no parameter moves
        self.tasks = 0
        self.steps = 0
        self.not_estimated: set[str] = set()  # parameters that did not train when importance was estimated
        self.consolidated: dict[str, bool] = {}  # the parameters at the last consolidation; whether each had a state
        self.created = False  # whether a state was created or replaced since the flag was last cleared
        self.records: dict[Tensor, ParameterState] = {}
        self.names: dict[Tensor, str] = {}
        self._foreign: set[Tensor] = set()
        self.layers: dict[nn.Module, dict[str, Tensor]] = {}
        self.diagonal_reasons: dict[Tensor, str] = {}
        self.with_factors: set[Tensor] = set()
        self.groups: dict[Tensor, int] = {}  # of weights of convolutions that have several
        self.refresh()

    def refresh(self) -> None:
        """Read the model's parameters again: some may have appeared or left."""
        self.names = moorable(self.model, self.exclude)
        gone = {state.name: state for p, state in self.records.items() if p not in self.names}
        self.records = {p: state for p, state in self.records.items() if p in self.names}
        self._foreign = {p for p in self.optimizer_parameters() if p not in self.names}
        self._find_products(gone.values())
        self.layers = {}
        if self.importance.by_layer:
            options = self.importance.largest, self.importance.blocks
            for layer, own in layers_with_factors(self.model, *options).items():
                if moored := {n: p for n, p in own.items() if p in self.names and p not in self.products}:
                    self.layers[layer] = moored
            self.with_factors = {p for own in self.layers.values() for p in own.values()}
            weights = ((own.get("weight"), layer_groups(layer)) for layer, own in self.layers.items())
            self.groups = {p: groups for p, groups in weights if p is not None and groups > 1}
            observed = {p: reason for p, reason in self.diagonal_reasons.items() if p in self.with_factors}
            self.diagonal_reasons = observed | diagonal_reasons(self.model, *options)
        for layer, own in self.products.layers.items():
            self.layers[layer] = self.layers.get(layer, {}) | own
        self._all_names = moorable(self.model, ())
        resized = [(state, p) for p, state in self.records.items() if state.shape != p.shape]
        for p, name in self.names.items() if gone else ():
            if name in gone and p not in self.records and keeps_rows(gone[name].parameter.detach(), p.detach()):
                resized.append((gone[name], p))
        for state, p in resized:
            self._resize(state, p)

    def _find_products(self, gone: Iterable[ParameterState]) -> None:
        """Read the low-rank adapters that the model has now; remember the factors of those that left it."""
        products = find_products(module_names(self.model), self.names)
        reason = self.adapters
        if not self.importance.by_layer and is_one_graph(self.model):
            reason = ONE_GRAPH
        if isinstance(reason, str):
            self.products = by_parameters(products, reason)
            return
        for state in gone:
            if isinstance(state.factors, ProductFactors) and state.factors.tasks:
                self.merged_products[state.factors.layer_name] = state.factors
        self.products = products
        for b, low_rank in self.products.by_b.items():
            factors = self.records[b].factors if b in self.records else None
            if isinstance(factors, ProductFactors):
                factors.low_rank = low_rank  # its scale may have changed

    def join_products(self, records: dict[Tensor, ParameterState]) -> None:
        """Link the states of A and B of each product that is held."""
        for a, b in self.products.by_a.items():
            if a in records and b in records:
                records[a].held_with, records[b].held_with = records[b], records[a]

    @property
    def observes(self) -> bool:
        """Whether layers are observed in this iteration; those of low-rank products also in the powers of 2."""
        if self.steps % self.observed_every == 0:
            return True
        return not self.importance.by_layer and self.steps & (self.steps - 1) == 0

    @property
    def reads_outputs(self) -> bool:
        """Whether this iteration changes an importance; low-rank products have no scores, and are observed rarely."""
        return self.observes or not self.records or any(state.has_scores for state in self.records.values())

    @property
    def largest_side(self) -> int:
        """The number of inputs, or outputs, from which on a low-rank product has a diagonal factor."""
        return self.adapters.largest if isinstance(self.adapters, Product) else 0

    def resized(self) -> Collection[ParameterState]:
        """Return the states, after those of parameters that changed their shape were moved to the new one."""
        if any(state.shape != p.shape for p, state in self.records.items()):
            self.refresh()
        return self.records.values()

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore what is known of this task if the body fails, such as a gauge after an estimate."""
        kept = [(state, copy(state), copy(state.factors)) for state in self.records.values()]
        records, reasons, not_estimated = dict(self.records), dict(self.diagonal_reasons), self.not_estimated
        try:
            yield
        except BaseException:
            for state, before, factors in kept:
                state.__dict__.update(before.__dict__, factors=factors)
            self.records, self.diagonal_reasons, self.not_estimated = records, reasons, not_estimated
            raise

    def invalidate_staged(self) -> None:
        """Discard copies of offloaded anchors, before these change."""
        if self.offload:
            self.offload.invalidate()

    def optimizer_parameters(self) -> list[Tensor]:
        """Return every parameter of the optimizer."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def trained(self) -> list[Tensor]:
        """Return the parameters that the optimizer trains and that are not excluded."""
        return [p for p in self.optimizer_parameters() if p.requires_grad and self.is_moorable(p)]

    def trained_by_name(self) -> State:
        """Return the model's parameters that the optimizer trains, also excluded ones, by name."""
        trained = [p for p in self.optimizer_parameters() if p.requires_grad]
        for p in trained:
            self.is_moorable(p)  # makes the model be read again where one is unknown
        return {self._all_names[p]: p for p in trained if p in self._all_names}

    def is_moorable(self, p: Tensor) -> bool:
        """Return whether a parameter is to be moored; an unknown one makes the model be read again."""
        if p not in self.names and p not in self._foreign:
            self.refresh()
        return p in self.names

    def name(self, p: Tensor) -> str:
        """Return a parameter's name, also of an excluded one."""
        return self._all_names.get(p, "(a parameter outside the model)")

    def get_or_create(self, p: Tensor) -> ParameterState | None:
        """Return the state of a parameter, created if need be; None if the parameter is not to be moored."""
        if (known := self.records.get(p)) is not None and known.shape == p.shape:
            return known if p.dtype == known.dtype else self._convert(known)
        if not self.is_moorable(p):
            return None
        if p.is_complex() or (p.grad is not None and p.grad.layout != torch.strided):
            kind = "is complex" if p.is_complex() else "has a sparse gradient"
            raise MooringError(f"{self.names[p]!r} {kind}, which cannot be moored: exclude it")
        known = self.records.get(p)  # the model may have been read again
        if known is None:
            self.records[p] = self.new_state(p, self.tasks)
            self.records[p].unheld_reason = self.reason_of_new_state(self.names[p]) if self.tasks else ""
            self.created = True
            if p in self.products:
                for other in self.products.pair(p):
                    if other not in self.records:
                        self.records[other] = self.new_state(other, self.tasks)
                        self.records[other].unheld_reason = self.records[p].unheld_reason
                self.join_products(self.records)
        elif known.shape != p.shape:
            self._resize(known, p)
        return self.records[p]

    def _resize(self, old: ParameterState, p: Tensor) -> None:
        """Move a state to a parameter with another number of rows, whose new rows are free; else create a new one.

        `resize_token_embeddings` replaces either the module or the data of its parameter.
        """
        if sharded(p):
            raise MooringError(f"{self.names[p]!r} changed its shape, which a sharded parameter cannot: attach again")
        if old.factors and old.factors.inputs.ndim > 2:  # its blocks or groups have other sizes now
            self.to_scores(old)
        new = self.new_state(p, self.tasks)
        if old.held_with or p in self.products:
            pass  # another adapter of that name: its factors are those of its layer
        elif len(old.shape) == p.ndim > 0 and old.shape[1:] == p.shape[1:]:
            if new.factors and not old.factors:  # small enough for factors now, but the past has scores
                new.factors, new.importance_state = None, self.start_importance(p, self.tasks)
            new.take_rows(old)
        elif self.tasks:
            new.unheld_reason = RESHAPED
        self.records[p], self.created = new, True
        self.join_products(self.records)

    def reason_of_new_state(self, name: str) -> str:
        """Return why nothing is known of the past of a parameter that has no state after a consolidation."""
        if name in self.not_estimated:
            return NOT_ESTIMATED
        if name not in self.consolidated:
            return APPEARED
        return REPLACED if self.consolidated[name] else NOT_TRAINED

    def _convert(self, state: ParameterState) -> ParameterState:
        """Give the state of a parameter whose dtype has changed an anchor that is as exact."""
        p = state.parameter
        self.invalidate_staged()
        if self.memory.anchor is None:
            state.anchor = state.anchor.to(torch.promote_types(p.dtype, state.anchor.dtype))
        state.choose_dtype()
        if state.factors and not state.held_with:
            state.factors.choose_basis_dtype(p.dtype)
        self.created = True
        return state

    def new_state(self, p: Tensor, task: int) -> ParameterState:
        """Return the state of a parameter that starts here: anchored where it is, free without a past."""
        theta = local_tensor(p).detach()
        anchor = self.memory.new_anchor(theta) if self.copies_anchors else theta
        if p in self.products:
            product = self.new_product(p) if p in self.products.by_b else None
            return ParameterState(self.names[p], p, anchor, self.no_scores(p), factors=product)
        if p in self.with_factors:
            return ParameterState(self.names[p], p, anchor, self.no_scores(p), factors=self.new_factors(p))
        scores = self.start_importance(p, task) if self.memory.accumulates else {}
        return ParameterState(self.names[p], p, anchor, scores)

    def new_factors(self, p: Tensor) -> KroneckerFactors:
        """Return the factors of a parameter before anything is known of it."""
        return KroneckerFactors.zeros(
            p.detach(), compute_dtype_of(p), blocks=self.importance.blocks, groups=self.groups.get(p, 1)
        )

    def new_product(self, b: Tensor) -> ProductFactors:
        """Return the factors of a low-rank product, with what is known of past tasks of its layer."""
        assert isinstance(self.adapters, Product)
        name = self.products.layer_names[b]
        factors = ProductFactors.create(self.products.by_b[b], name, self.adapters, compute_dtype_of(b))
        others = [s.factors for s in self.records.values() if isinstance(s.factors, ProductFactors)]
        same_layer = (other for other in others if other.layer_name == name and other.tasks)
        if known := next(same_layer, self.merged_products.get(name)):
            factors.inherit(known)
        return factors

    def no_scores(self, p: Tensor) -> State:
        """Return the importance's tensors of a parameter that has factors instead."""
        return {"current": torch.zeros((), dtype=compute_dtype_of(p), device=p.device)}

    def to_scores(self, state: ParameterState) -> None:
        """Replace the factors of a parameter by their diagonal."""
        if (factors := state.factors) is None or state.held_with:
            return
        if not self.memory.accumulates:
            state.importance_state = {}
        elif not state.has_scores:
            state.importance_state = self.start_importance(state.parameter, self.tasks)
            state.importance_state["current"].copy_(factors.diagonal(state.theta))
        if factors.tasks:
            state.previous = self.memory.store_previous(factors.past_diagonal(state.theta), state.theta)
        state.factors = None

    def start_importance(self, p: Tensor, task: int) -> State:
        """Return the importance's tensors at the start of a task; of a shard, its part of the whole parameter's."""
        theta, dtype = local_tensor(p).detach(), compute_dtype_of(p)
        if isinstance(self.memory.current, torch.dtype):
            dtype = torch.promote_types(dtype, self.memory.current)
        like = theta if theta.dtype == dtype else torch.empty_like(theta, dtype=dtype)
        state = self.importance.start(to_dtensor(like, p), name=self.names[p], task=task)
        if "current" not in state or RESERVED_SLOTS & state.keys():
            raise MooringError(
                f"{self.importance.name}.start must return 'current' and none of {', '.join(sorted(RESERVED_SLOTS))}"
            )
        state = {slot: local_part(tensor, p) for slot, tensor in state.items()}
        return {**state, "current": self.memory.store_current(state["current"])}

    @property
    def idle(self) -> bool:
        """Whether nothing happened since the last consolidation: no step and no estimate, where either is needed."""
        needed = self.tasks > 0 or self.importance.merges
        return needed and not self.steps and not any(state.count for state in self.records.values())

    def consolidate(self, pull: Callable[[], None] = lambda: None, *, decompose: bool = True) -> None:
        """End a task, as `consolidate` says; without a step or estimate since the last one, only move the anchors."""
        self.invalidate_staged()
        if self.idle:
            self._move_idle_anchors()
            return
        self.refresh()
        for p in self.trained():
            self.get_or_create(p)
        if self.needs_data:
            raise MooringError(
                'this task has no importance, because Memory(current="none"), the default with a reference, keeps '
                "nothing in training: give consolidate(data=...) some of its data, or attach(memory=Memory()) before it"
            )
        consolidate(
            self.records.values(),
            self.importance,
            self.merge,
            self.memory,
            lambda state, task: self.start_importance(state.parameter, task),
            self.tasks,
            pull,
            decompose,
        )
        self.tasks += 1
        self.steps = 0
        self.remember_names()

    def continue_from(self, records: dict[Tensor, ParameterState], header: dict[str, Any]) -> None:
        """Continue from a saved state that was read."""
        self.records = records
        self.tasks, self.steps = header["tasks"], header["steps"]
        self.remember_names()
        self.not_estimated = {*header.get("not_estimated", ())}

    def remember_names(self) -> None:
        """Remember which parameters there are at the end of a task, and which of them have a state."""
        recorded = {state.name for state in self.records.values()}
        self.consolidated = {name: name in recorded for name in self.names.values()}

    def _move_idle_anchors(self) -> None:
        """anchor <- theta without counting a task; warn, and name parameters that moved without a step."""
        self.refresh()
        if not self.tasks:
            warn(
                "consolidate() saw no step of this optimizer, so nothing is protected and no task is counted: train "
                "with optimizer.step() (with SAM, attach to its base_optimizer), call moor.rebind(optimizer) if "
                "another optimizer trained, or give consolidate(data=...)",
                UnheldWarning,
            )
        moved = [s.name for s in self.records.values() if bool((s.theta != s.device_anchor).any())]
        if moved:
            warn(
                f"{first_and_count(moved)} moved since the last task and this Mooring saw no step: nothing was "
                "protected, and no task is counted. If the optimizer is a new one, call moor.rebind(optimizer)",
            )
        elif self.tasks:
            warn(
                "consolidate() saw no step since the last task, so it has no effect and no task is counted: train "
                "before it, and call moor.rebind(optimizer) if the optimizer is a new one"
            )
        move_anchors(self.records.values())

    @property
    def needs_data(self) -> bool:
        """Whether the end of the present task needs data, because no importance of it is kept."""
        if not self.importance.merges or self.memory.accumulates:
            return False
        trained = (s for s in self.records.values() if s.count and s.unheld_reason != NOT_OBSERVED)
        return any(not state.knows_task for state in trained)


def is_one_graph(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, was compiled as one graph, in which layers cannot be observed.

    That is with fullgraph=True, by `torch.compile` or by a module's own method `compile`.
    """
    for module in model.modules():
        context = getattr(module, "dynamo_ctx", None)
        if inspect.isfunction(call := getattr(module, "_compiled_call_impl", None)):
            context = inspect.getclosurevars(call).nonlocals.get("self")  # torch keeps the options nowhere else
        if getattr(context, "fullgraph", False):
            return True
    return False
