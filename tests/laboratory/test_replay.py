"""Replay: the reservoir samples uniformly, A-GEM projects as published, and both methods equal a plain loop."""

from collections import Counter
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import pytest
import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from laboratory.small import class_stream, domain_stream, growing_stream, optimizer_by_hand, scheduler_by_hand, spec_for
from mooring_lab.engines.runner import steps_per_run
from mooring_lab.fleet import checkpoint
from mooring_lab.fleet.fleet import Fleet, Position
from mooring_lab.fleet.replay_memory import Reservoir
from mooring_lab.methods import replay
from mooring_lab.methods.replay.agem import project_agem
from mooring_lab.model.order import seeded_generator, task_order
from mooring_lab.networks.initialization import initial_network
from mooring_lab.networks.inputs import normalize_pixels

EXACT = {"rtol": 1e-9, "atol": 1e-9}
STREAMS = {"classes": class_stream(), "domains": domain_stream(), "growing": growing_stream()}
MIN_P_VALUE = 1e-4  # how often a correct reservoir would fail one of these tests if the seeds were not fixed


# The reservoir


def filled_reservoir(seeds: range, capacity: int, arrival: list[int], chunks: list[int]) -> Reservoir:
    memory, begin = Reservoir(seeds, capacity), 0
    for size in chunks:
        memory.offer(torch.tensor(arrival[begin : begin + size]).expand(len(seeds), size))
        begin += size
    assert begin == len(arrival)
    return memory


CHUNKS = {"at once": [5], "one by one": [1] * 5, "in pieces": [3, 2], "across the capacity": [1, 4]}


@pytest.mark.parametrize("arrival", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]], ids=str)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_every_possible_content_is_equally_likely(chunks, arrival):
    seeds = range(2000)
    memory = filled_reservoir(seeds, 2, arrival, chunks)
    counts = Counter(tuple(sorted(kept)) for kept in memory.kept.tolist())
    sets = list(combinations(range(5), 2))
    assert set(counts) <= set(sets)  # two different indices, each of them offered
    assert stats.chisquare([counts[kept] for kept in sets]).pvalue > MIN_P_VALUE


def test_every_index_is_kept_with_the_same_probability():
    """The counts of a sample without replacement have variance n p (1 - p) each, and a fixed sum."""
    seeds, many, capacity = range(3000), 60, 7
    memory = filled_reservoir(seeds, capacity, list(range(many)), [20, 1, 30, 9])
    counts = torch.bincount(memory.kept.flatten(), minlength=many).double()
    share = capacity / many
    spread = ((counts - len(seeds) * share) ** 2 / (len(seeds) * share * (1 - share))).sum() * (many - 1) / many
    assert stats.chi2.sf(float(spread), many - 1) > MIN_P_VALUE


def test_reservoir_keeps_everything_until_it_is_full():
    memory = Reservoir([0, 1], 4)
    for number in range(12):
        memory.offer(torch.tensor([[number], [100 + number]]))
        assert (memory.offered, len(memory)) == (number + 1, min(number + 1, 4))
        assert memory.kept.shape == (2, 4)
        for run, base in ((0, 0), (1, 100)):
            kept = memory.kept[run, : len(memory)].tolist()
            assert len(set(kept)) == len(kept)
            assert set(kept) <= set(range(base, base + number + 1))
            if number < 4:
                assert sorted(kept) == list(range(base, base + number + 1))


def test_sample_has_no_repeats_and_every_order_is_equally_likely():
    memory = filled_reservoir(range(3000), 3, [7, 8, 9], [3])
    drawn = memory.sample(2)
    assert drawn.shape == (3000, 2)
    counts = Counter(map(tuple, drawn.tolist()))
    pairs = list(permutations([7, 8, 9], 2))
    assert set(counts) == set(pairs)
    assert stats.chisquare([counts[pair] for pair in pairs]).pvalue > MIN_P_VALUE
    assert not torch.equal(memory.sample(2), drawn)  # drawn anew each time


def test_sample_never_contains_empty_slots():
    memory = filled_reservoir(range(50), 9, [5, 6], [2])
    for _ in range(5):
        assert memory.sample(2).sort(1).values.tolist() == [[5, 6]] * 50
        assert memory.sample(4).shape == (50, 2)


def test_memory_of_a_run_depends_on_its_seed_alone():
    alone, fleet = Reservoir([5], 4), Reservoir([3, 5, 7], 4)
    for begin in (0, 10, 20):
        fresh = torch.arange(begin, begin + 10)
        alone.offer(fresh[None])
        fleet.offer(torch.stack([fresh + 100, fresh, fresh + 200]))
        assert torch.equal(fleet.kept[1], alone.kept[0])
        assert torch.equal(fleet.sample(3)[1], alone.sample(3)[0])
    fleet.keep(torch.tensor([1]))  # the other runs failed
    alone.offer(torch.arange(30, 40)[None])
    fleet.offer(torch.arange(30, 40)[None])
    assert torch.equal(fleet.kept, alone.kept)
    assert torch.equal(fleet.sample(4), alone.sample(4))


# A-GEM's projection


def projected_by_hand(g: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Equation 11 of A-GEM, on whole vectors: g - (g'r / r'r) r where g'r < 0."""
    return g - (g @ r) / (r @ r) * r if float(g @ r) < 0 else g


def vector_of(tensors: dict[str, torch.Tensor], run: int) -> torch.Tensor:
    return torch.cat([tensors[name][run].flatten() for name in SHAPES])


SHAPES = {"one.weight": (4, 3), "one.bias": (4,), "two.weight": (2, 4), "two.bias": (2,)}


def random_gradients(seed: int, runs: int = 40) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(runs, *shape, generator=random, dtype=torch.float64) for name, shape in SHAPES.items()}


def test_projection_equals_the_published_one_over_all_parameters():
    g, r = random_gradients(0), random_gradients(1)
    projected, changed = project_agem(g, r), 0
    for run in range(40):
        gradient, reference = vector_of(g, run), vector_of(r, run)
        torch.testing.assert_close(
            vector_of(projected, run), projected_by_hand(gradient, reference), rtol=1e-12, atol=1e-12
        )
        if float(gradient @ reference) < 0:
            changed += 1
            assert abs(float(vector_of(projected, run) @ reference)) < 1e-12  # the loss on old samples does not rise
        else:
            assert torch.equal(vector_of(projected, run), gradient)
    assert 10 < changed < 30


def test_projection_uses_the_product_over_all_parameters_together():
    """Products per parameter would change the weight in the first case, and not the bias in the second."""
    g = {"weight": torch.tensor([[[1.0, 0.0]]]), "bias": torch.tensor([[2.0]])}
    against = {"weight": torch.tensor([[[-1.0, 0.0]]]), "bias": torch.tensor([[1.0]])}
    projected = project_agem(g, against)
    assert all(torch.equal(projected[name], g[name]) for name in g)
    more = {"weight": torch.tensor([[[-3.0, 0.0]]]), "bias": torch.tensor([[1.0]])}  # g'r = -1, r'r = 10
    projected = project_agem(g, more)
    torch.testing.assert_close(projected["weight"], torch.tensor([[[0.7, 0.0]]]))
    torch.testing.assert_close(projected["bias"], torch.tensor([[2.1]]))


def test_missing_parameter_counts_as_zero():
    g, r = random_gradients(2), random_gradients(3)
    only_g = {name: t for name, t in g.items() if name != "two.bias"}
    only_r = {name: t for name, t in r.items() if name != "one.weight"}
    projected = project_agem(only_g, only_r)
    full_g = {**g, "two.bias": torch.zeros_like(g["two.bias"])}
    full_r = {**r, "one.weight": torch.zeros_like(r["one.weight"])}
    for run in range(40):
        expected = projected_by_hand(vector_of(full_g, run), vector_of(full_r, run))
        torch.testing.assert_close(vector_of(projected, run), expected, rtol=1e-12, atol=1e-12)


def test_projection_does_not_change_its_arguments():
    g, r = random_gradients(4), random_gradients(5)
    project_agem(g, r)
    for gradients, seed in ((g, 4), (r, 5)):
        assert all(torch.equal(gradients[name], random_gradients(seed)[name]) for name in SHAPES)


# The methods


class ListMemory:
    """Algorithm R in its textbook form, on a list, with the random numbers of one run."""

    def __init__(self, seed: int, capacity: int) -> None:
        self.seed, self.capacity, self.kept = seed, capacity, []
        self.offered = self.samples = 0

    def offer(self, indices: list[int]) -> None:
        random = torch.rand(
            len(indices), generator=seeded_generator(self.seed, "reservoir", self.offered), dtype=torch.double
        )
        for index, number in zip(indices, random.tolist(), strict=True):
            self.offered += 1
            place = int(number * self.offered)
            if len(self.kept) < self.capacity:
                self.kept.append(index)
            elif place < self.capacity:
                self.kept[place] = index

    def sample(self, count: int) -> torch.Tensor:
        self.samples += 1
        order = torch.randperm(len(self.kept), generator=seeded_generator(self.seed, "replay", self.samples))
        return torch.tensor(self.kept)[order[:count]]


@dataclass(frozen=True)
class Variant:
    """What a variant of experience replay or A-GEM does, for the loop."""

    base: str
    recalls: int | None = None
    past_only: bool = False
    updates: int = 1


VARIANTS = {
    "er": Variant("er"),
    "a-gem": Variant("a-gem", past_only=True),
    "er-50": Variant("er", recalls=50),
    "er-past": Variant("er", past_only=True),
    "a-gem-256": Variant("a-gem", past_only=True, recalls=256),
    "er-2-updates": Variant("er", updates=2),
    "a-gem-2-updates": Variant("a-gem", past_only=True, updates=2),
}


class Loop:
    """Experience replay and A-GEM as a plain PyTorch loop over one network."""

    def __init__(self, spec, stream) -> None:
        self.spec, self.stream, self.variant = spec, stream, VARIANTS[spec.method]
        self.model = initial_network(spec.network, stream, spec.seed, dtype=torch.float64)
        self.memory = ListMemory(spec.seed, spec.memory or 0)
        self.projected = self.unchanged = 0
        self.owner = {int(i): number for number, task in enumerate(stream.tasks) for i in task.train}

    def loss(self, indices: torch.Tensor, heads: int | torch.Tensor) -> torch.Tensor:
        x = normalize_pixels(self.stream.train.images[indices], torch.float64)
        logits, labels = self.model(x, heads), self.stream.train.labels[indices]
        if self.stream.scenario == "class":  # two classes a task
            labels = labels + torch.tensor([2 * self.owner[int(i)] for i in indices])
            logits = logits[:, : 2 * (self.number + 1)]
        return cross_entropy(logits, labels)

    def heads(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.stream.head(self.owner[int(i)]) for i in indices])

    def train(self) -> "Loop":
        spec, stream = self.spec, self.stream
        for number, task in enumerate(stream.tasks):
            self.number = number
            if number and stream.heads == "per task":
                self.model.inherit(number, number - 1)
            optimizer = optimizer_by_hand(spec, self.model.parameters())
            updates = len(task.train.split(spec.batch)) * self.variant.updates
            self.scheduler = scheduler_by_hand(spec, optimizer, updates)
            for epoch in range(spec.epochs):
                for batch in task_order(spec.seed, number, epoch, task.train).split(spec.batch):
                    for _ in range(self.variant.updates):
                        self.update(batch, number, optimizer)
                    if epoch == 0 and not self.variant.past_only:
                        self.memory.offer(batch.tolist())
            if self.variant.past_only:
                self.memory.offer(task_order(spec.seed, number, 0, task.train).tolist())
        return self

    def update(self, batch: torch.Tensor, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Train on a batch once, and on newly drawn samples if there are any."""
        optimizer.zero_grad()
        old = self.memory.sample(self.variant.recalls or len(batch)) if self.memory.kept else None
        if self.variant.base == "a-gem":
            self.agem(batch, number, old)
        else:
            both = batch if old is None else torch.cat([batch, old])
            self.loss(both, self.heads(both)).backward()
        optimizer.step()
        self.scheduler.step()

    def agem(self, batch: torch.Tensor, number: int, old: torch.Tensor | None) -> None:
        parameters = list(self.model.parameters())
        loss = self.loss(batch, self.stream.head(number))
        if old is None:
            loss.backward()
            return
        g, r = (self.flat_gradient(parameters, own_loss) for own_loss in (loss, self.loss(old, self.heads(old))))
        self.projected, self.unchanged = self.projected + int(g @ r < 0), self.unchanged + int(g @ r >= 0)
        flat = projected_by_hand(g, r)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()

    def flat_gradient(self, parameters: list[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
        """Return the gradient of all parameters as one vector."""
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        return torch.cat(
            [
                torch.zeros_like(p).flatten() if g is None else g.flatten()
                for p, g in zip(parameters, gradients, strict=True)
            ]
        )


@pytest.mark.parametrize("memory", [7, 200], ids=["small memory", "memory for everything"])
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", ["er", "a-gem"])
def test_replay_fleet_equals_a_plain_loop(method, kind, memory):
    stream = STREAMS[kind]
    specs = [spec_for(method, stream, seed, lr=0.02 * (seed + 1), memory=memory) for seed in (2, 0)]
    fleet = Fleet(specs, stream)
    order = list(fleet.specs)
    fleet.run()
    for row, spec in enumerate(order):
        loop = Loop(spec, stream).train()
        torch.testing.assert_close(fleet.stack.network_of(row).state_dict(), loop.model.state_dict(), **EXACT)
        assert sorted(fleet.learner.memory.kept[row, : len(fleet.learner.memory)].tolist()) == sorted(loop.memory.kept)
        if method == "a-gem":
            assert loop.projected > 0
            assert loop.unchanged > 0 or kind == "growing"  # the classes of a growing head compete in every step


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", [name for name in VARIANTS if name not in ("er", "a-gem")])
def test_variant_equals_a_plain_loop(method, kind):
    stream, base = STREAMS[kind], VARIANTS[method].base
    specs = [spec_for(method, stream, seed, lr=0.004 * (seed + 1), memory=60) for seed in (2, 0)]
    fleet = Fleet(specs, stream)
    order = list(fleet.specs)
    results = {result.spec: result for result in fleet.run()}
    for row, spec in enumerate(order):
        loop = Loop(spec, stream).train()
        torch.testing.assert_close(fleet.stack.network_of(row).state_dict(), loop.model.state_dict(), **EXACT)
        assert sorted(fleet.learner.memory.kept[row, : len(fleet.learner.memory)].tolist()) == sorted(loop.memory.kept)
        changed, base_loop = loop.model.state_dict(), Loop(replace(spec, method=base), stream).train()
        unchanged = base_loop.model.state_dict()
        assert any(not torch.allclose(changed[name], unchanged[name], **EXACT) for name in changed)
        assert results[spec].steps == steps_per_run(spec, stream)


def test_every_variant_of_replay_is_compared_with_a_loop():
    names = {method.name for method in (*replay.METHODS, *replay.VARIANTS)}
    assert set(VARIANTS) == {name for name in names if not name.endswith("-as-published")}  # which have their own loops


class InnerCheckpoint:
    """Saves the fleet in the middle of the second task."""

    def __init__(self, path) -> None:
        self.path = path

    def on_step(self, fleet: Fleet) -> None:
        if fleet.position == Position(1, 1, 3):
            checkpoint.save(fleet, self.path)

    def on_task_end(self, fleet: Fleet) -> None:
        pass


@pytest.mark.parametrize("method", ["er-past", "er-2-updates"])
def test_interrupted_variant_equals_one_that_was_not(method, tmp_path):
    stream = STREAMS["classes"]
    spec = spec_for(method, stream, 1, lr=0.01)
    whole, resumed = Fleet([spec], stream), Fleet([spec], stream)
    whole.run(InnerCheckpoint(tmp_path / "fleet"))
    checkpoint.restore(resumed, tmp_path / "fleet")
    resumed.run()
    expected, got = whole.stack.network_of(0).state_dict(), resumed.stack.network_of(0).state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert whole.measured.results[0].losses == resumed.measured.results[0].losses


@pytest.mark.parametrize("method", ["er", "a-gem"])
def test_replay_fleet_with_weight_decay_equals_a_plain_loop(method):
    stream = STREAMS["domains"]
    spec = spec_for(method, stream, 4, lr=0.02, weight_decay=0.01, memory=15)
    fleet = Fleet([spec], stream)
    fleet.run()
    torch.testing.assert_close(
        fleet.stack.network_of(0).state_dict(), Loop(spec, stream).train().model.state_dict(), **EXACT
    )


class MemoryHistory:
    """Records the memory in each step, as it will be after the epoch, and after each task."""

    def __init__(self) -> None:
        self.offered: dict[Position, int] = {}
        self.kept: dict[Position, torch.Tensor] = {}
        self.after_tasks: list[tuple[int, torch.Tensor]] = []

    def on_step(self, fleet: Fleet) -> None:
        self.offered[fleet.position] = fleet.learner.ahead.offered
        self.kept[fleet.position] = fleet.learner.ahead.kept.clone()

    def on_task_end(self, fleet: Fleet) -> None:
        self.after_tasks.append((fleet.learner.memory.offered, fleet.learner.memory.kept.clone()))


def test_er_stores_samples_in_the_first_epoch_only():
    stream = STREAMS["classes"]  # 36 images a task, in batches of 10, 10, 10 and 6
    seen = MemoryHistory()
    Fleet([spec_for("er", stream, memory=5)], stream).run(seen)
    places = [Position(task, epoch, step) for task in range(3) for epoch in range(2) for step in range(1, 5)]
    assert seen.offered == {place: 36 * (place.task + 1) for place in places}
    for task in range(3):
        assert all(torch.equal(seen.kept[Position(task, 1, s)], seen.kept[Position(task, 0, 4)]) for s in range(1, 5))


def test_agem_stores_samples_at_the_end_of_a_task():
    stream = STREAMS["classes"]
    seen = MemoryHistory()
    Fleet([spec_for("a-gem", stream, memory=5)], stream).run(seen)
    assert {(p.task, offered) for p, offered in seen.offered.items()} == {(0, 0), (1, 36), (2, 72)}
    assert [offered for offered, _ in seen.after_tasks] == [36, 72, 108]


@pytest.mark.parametrize("method", ["er", "a-gem"])
@pytest.mark.parametrize("kind", STREAMS)
def test_memory_contains_training_images_of_trained_tasks(method, kind):
    stream = STREAMS[kind]
    seen = MemoryHistory()
    Fleet([spec_for(method, stream, seed, memory=12) for seed in (0, 1)], stream).run(seen)
    met: set[int] = set()
    for task, (_, kept) in zip(stream.tasks, seen.after_tasks, strict=True):
        met |= set(task.train.tolist())
        assert kept.dtype == torch.int64
        assert kept.shape == (2, 12)
        for row in kept.tolist():
            assert len(set(row)) == 12
            assert set(row) <= met


def test_step_may_draw_more_samples_than_its_batch_has():
    memory = Reservoir([0, 1], 50)
    memory.offer(torch.arange(40).expand(2, 40))
    drawn = memory.plan(torch.arange(30).expand(2, 30), [10, 10, 10], offer=False, count=25)
    assert [step.shape for step in drawn] == [(2, 25)] * 3
    assert all(len(set(row.tolist())) == 25 for step in drawn for row in step)
