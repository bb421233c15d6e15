"""Replay: the reservoir is one, A-GEM projects as the paper says, and both methods equal a loop written out by hand."""

from collections import Counter
from itertools import combinations, permutations

import pytest
import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from lab.small import class_stream, domain_stream, spec_for
from mooring.lab.fleet.fleet import Fleet, Position
from mooring.lab.fleet.reservoir import Reservoir, project_agem
from mooring.lab.model.order import seeded_generator, task_order
from mooring.lab.networks.initialization import initial_network
from mooring.lab.networks.inputs import normalize_pixels

EXACT = {"rtol": 1e-9, "atol": 1e-9}
STREAMS = {"classes": class_stream(), "domains": domain_stream()}
RARE = 1e-4  # how often a fair reservoir would fail one of these tests, if seeds were not fixed


# The reservoir


def offered(seeds: range, capacity: int, arrival: list[int], chunks: list[int]) -> Reservoir:
    memory, begin = Reservoir(seeds, capacity), 0
    for size in chunks:
        memory.offer(torch.tensor(arrival[begin : begin + size]).expand(len(seeds), size))
        begin += size
    assert begin == len(arrival)
    return memory


CHUNKS = {"at once": [5], "one by one": [1] * 5, "in pieces": [3, 2], "across the capacity": [1, 4]}


@pytest.mark.parametrize("arrival", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3]], ids=str)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_every_set_that_a_reservoir_could_keep_is_equally_likely_however_it_was_offered(chunks, arrival):
    seeds = range(2000)
    memory = offered(seeds, 2, arrival, chunks)
    counts = Counter(tuple(sorted(kept)) for kept in memory.kept.tolist())
    sets = list(combinations(range(5), 2))
    assert set(counts) <= set(sets)  # two different indices, each of them offered
    assert stats.chisquare([counts[each] for each in sets]).pvalue > RARE


def test_every_index_is_kept_with_the_same_probability_in_a_long_stream():
    """Counts of a sample without replacement have variance n p (1 - p) each and a fixed sum."""
    seeds, many, capacity = range(3000), 60, 7
    memory = offered(seeds, capacity, list(range(many)), [20, 1, 30, 9])
    counts = torch.bincount(memory.kept.flatten(), minlength=many).double()
    share = capacity / many
    spread = ((counts - len(seeds) * share) ** 2 / (len(seeds) * share * (1 - share))).sum() * (many - 1) / many
    assert stats.chi2.sf(float(spread), many - 1) > RARE


def test_a_reservoir_keeps_everything_until_it_is_full_and_never_more_than_its_capacity():
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


def test_a_sample_has_no_repeats_and_every_order_of_it_is_equally_likely():
    memory = offered(range(3000), 3, [7, 8, 9], [3])
    drawn = memory.sample(2)
    assert drawn.shape == (3000, 2)
    counts = Counter(map(tuple, drawn.tolist()))
    pairs = list(permutations([7, 8, 9], 2))
    assert set(counts) == set(pairs)
    assert stats.chisquare([counts[pair] for pair in pairs]).pvalue > RARE
    assert not torch.equal(memory.sample(2), drawn)  # drawn anew each time


def test_a_sample_is_never_of_places_that_are_still_empty():
    memory = offered(range(50), 9, [5, 6], [2])
    for _ in range(5):
        assert memory.sample(2).sort(1).values.tolist() == [[5, 6]] * 50
        assert memory.sample(4).shape == (50, 2)


def test_what_a_run_remembers_depends_on_its_seed_and_not_on_its_neighbours():
    alone, fleet = Reservoir([5], 4), Reservoir([3, 5, 7], 4)
    for begin in (0, 10, 20):
        fresh = torch.arange(begin, begin + 10)
        alone.offer(fresh[None])
        fleet.offer(torch.stack([fresh + 100, fresh, fresh + 200]))
        assert torch.equal(fleet.kept[1], alone.kept[0])
        assert torch.equal(fleet.sample(3)[1], alone.sample(3)[0])
    fleet.keep(torch.tensor([1]))  # the neighbours were lost
    alone.offer(torch.arange(30, 40)[None])
    fleet.offer(torch.arange(30, 40)[None])
    assert torch.equal(fleet.kept, alone.kept)
    assert torch.equal(fleet.sample(4), alone.sample(4))


# A-GEM's projection


def projected_by_hand(g: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Equation 11 of A-GEM, on whole vectors: g - (g'r / r'r) r where g'r < 0."""
    return g - (g @ r) / (r @ r) * r if float(g @ r) < 0 else g


def vectors(told: dict[str, torch.Tensor], run: int) -> torch.Tensor:
    return torch.cat([told[name][run].flatten() for name in SHAPES])


SHAPES = {"one.weight": (4, 3), "one.bias": (4,), "two.weight": (2, 4), "two.bias": (2,)}


def drawn(seed: int, runs: int = 40) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(runs, *shape, generator=random, dtype=torch.float64) for name, shape in SHAPES.items()}


def test_the_projection_is_the_papers_over_all_parameters_of_a_run_at_once():
    g, r = drawn(0), drawn(1)
    found, turned = project_agem(g, r), 0
    for run in range(40):
        mine, theirs = vectors(g, run), vectors(r, run)
        torch.testing.assert_close(vectors(found, run), projected_by_hand(mine, theirs), rtol=1e-12, atol=1e-12)
        if float(mine @ theirs) < 0:
            turned += 1
            assert abs(float(vectors(found, run) @ theirs)) < 1e-12  # the loss on old samples does not rise
        else:
            assert torch.equal(vectors(found, run), mine)
    assert 10 < turned < 30


def test_a_gradient_is_left_alone_where_weights_and_biases_agree_only_together():
    """The trap: products taken parameter by parameter would turn the weight here, and not the bias below."""
    g = {"weight": torch.tensor([[[1.0, 0.0]]]), "bias": torch.tensor([[2.0]])}
    against = {"weight": torch.tensor([[[-1.0, 0.0]]]), "bias": torch.tensor([[1.0]])}
    found = project_agem(g, against)
    assert all(torch.equal(found[name], g[name]) for name in g)
    more = {"weight": torch.tensor([[[-3.0, 0.0]]]), "bias": torch.tensor([[1.0]])}  # g'r = -1, r'r = 10
    found = project_agem(g, more)
    torch.testing.assert_close(found["weight"], torch.tensor([[[0.7, 0.0]]]))
    torch.testing.assert_close(found["bias"], torch.tensor([[2.1]]))


def test_a_parameter_that_one_of_the_gradients_lacks_counts_as_zero_there():
    g, r = drawn(2), drawn(3)
    only_g = {name: t for name, t in g.items() if name != "two.bias"}
    only_r = {name: t for name, t in r.items() if name != "one.weight"}
    found = project_agem(only_g, only_r)
    full_g = {**g, "two.bias": torch.zeros_like(g["two.bias"])}
    full_r = {**r, "one.weight": torch.zeros_like(r["one.weight"])}
    for run in range(40):
        expected = projected_by_hand(vectors(full_g, run), vectors(full_r, run))
        torch.testing.assert_close(vectors(found, run), expected, rtol=1e-12, atol=1e-12)


def test_a_projection_does_not_change_what_it_was_given():
    g, r = drawn(4), drawn(5)
    project_agem(g, r)
    assert all(torch.equal(g[name], drawn(4)[name]) and torch.equal(r[name], drawn(5)[name]) for name in SHAPES)


# The methods


class ListMemory:
    """Algorithm R in its textbook form, on a list, with a run's own random numbers."""

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


class Loop:
    """Experience replay and A-GEM as a plain PyTorch loop over one network."""

    def __init__(self, spec, stream) -> None:
        self.spec, self.stream = spec, stream
        self.model = initial_network(spec.network, stream, spec.seed, dtype=torch.float64)
        self.memory = ListMemory(spec.seed, spec.memory)
        self.turned = self.straight = 0
        self.owner = {int(i): number for number, task in enumerate(stream.tasks) for i in task.train}

    def loss(self, indices: torch.Tensor, heads: int | torch.Tensor) -> torch.Tensor:
        x = normalize_pixels(self.stream.train.images[indices], torch.float64)
        return cross_entropy(self.model(x, heads), self.stream.train.labels[indices])

    def heads(self, indices: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.stream.head(self.owner[int(i)]) for i in indices])

    def train(self) -> "Loop":
        spec, stream = self.spec, self.stream
        for number, task in enumerate(stream.tasks):
            if number and stream.heads == "per task":
                self.model.inherit(number, number - 1)
            parameters = list(self.model.parameters())
            optimizer = torch.optim.SGD(parameters, lr=spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay)
            for epoch in range(spec.epochs):
                for batch in task_order(spec.seed, number, epoch, task.train).split(spec.batch):
                    optimizer.zero_grad()
                    getattr(self, spec.method.replace("-", ""))(batch, number, epoch)
                    optimizer.step()
            if spec.method == "a-gem":
                self.memory.offer(task_order(spec.seed, number, 0, task.train).tolist())
        return self

    def er(self, batch: torch.Tensor, number: int, epoch: int) -> None:
        both = torch.cat([batch, self.memory.sample(len(batch))]) if self.memory.kept else batch
        self.loss(both, self.heads(both)).backward()
        if epoch == 0:
            self.memory.offer(batch.tolist())

    def agem(self, batch: torch.Tensor, number: int, epoch: int) -> None:
        parameters = list(self.model.parameters())
        loss = self.loss(batch, self.stream.head(number))
        if not self.memory.kept:
            loss.backward()
            return
        old = self.memory.sample(len(batch))
        g, r = (self.whole(parameters, each) for each in (loss, self.loss(old, self.heads(old))))
        self.turned, self.straight = self.turned + int(g @ r < 0), self.straight + int(g @ r >= 0)
        flat = projected_by_hand(g, r)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p).clone()

    def whole(self, parameters: list[torch.Tensor], loss: torch.Tensor) -> torch.Tensor:
        """The gradient over every parameter of the network as one vector."""
        each = torch.autograd.grad(loss, parameters, allow_unused=True)
        return torch.cat(
            [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in zip(parameters, each, strict=True)]
        )


@pytest.mark.parametrize("memory", [7, 200], ids=["small memory", "memory for everything"])
@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("method", ["er", "a-gem"])
def test_a_replay_fleet_equals_a_loop_written_by_hand(method, kind, memory):
    stream = STREAMS[kind]
    specs = [spec_for(method, stream, seed, lr=0.02 * (seed + 1), memory=memory) for seed in (2, 0)]
    fleet = Fleet(specs, stream)
    order = list(fleet.specs)
    fleet.run()
    for row, spec in enumerate(order):
        loop = Loop(spec, stream).train()
        torch.testing.assert_close(fleet.stack.network_of(row).state_dict(), loop.model.state_dict(), **EXACT)
        assert sorted(fleet.memory.kept[row, : len(fleet.memory)].tolist()) == sorted(loop.memory.kept)
        if method == "a-gem":
            assert min(loop.turned, loop.straight) > 0  # both cases were met


@pytest.mark.parametrize("method", ["er", "a-gem"])
def test_a_replay_fleet_equals_the_loop_with_weight_decay_too(method):
    stream = STREAMS["domains"]
    spec = spec_for(method, stream, 4, lr=0.02, weight_decay=0.01, memory=15)
    fleet = Fleet([spec], stream)
    fleet.run()
    torch.testing.assert_close(
        fleet.stack.network_of(0).state_dict(), Loop(spec, stream).train().model.state_dict(), **EXACT
    )


class MemoryOfEachEpoch:
    """An epoch's draws are planned ahead: what the memory will be after it is known in each of its steps."""

    def __init__(self) -> None:
        self.offered: dict[Position, int] = {}
        self.kept: dict[Position, torch.Tensor] = {}
        self.harbours: list[tuple[int, torch.Tensor]] = []

    def on_step(self, fleet: Fleet) -> None:
        self.offered[fleet.position] = fleet.ahead.offered
        self.kept[fleet.position] = fleet.ahead.kept.clone()

    def on_task_end(self, fleet: Fleet) -> None:
        self.harbours.append((fleet.memory.offered, fleet.memory.kept.clone()))


def test_er_remembers_in_the_first_epoch_of_a_task_only():
    stream = STREAMS["classes"]  # 36 images a task, in batches of 10, 10, 10 and 6
    seen = MemoryOfEachEpoch()
    Fleet([spec_for("er", stream, memory=5)], stream).run(seen)
    places = [Position(task, epoch, step) for task in range(3) for epoch in range(2) for step in range(1, 5)]
    assert seen.offered == {place: 36 * (place.task + 1) for place in places}
    for task in range(3):
        assert all(torch.equal(seen.kept[Position(task, 1, s)], seen.kept[Position(task, 0, 4)]) for s in range(1, 5))


def test_agem_remembers_at_the_end_of_a_task_only():
    stream = STREAMS["classes"]
    seen = MemoryOfEachEpoch()
    Fleet([spec_for("a-gem", stream, memory=5)], stream).run(seen)
    assert {(p.task, offered) for p, offered in seen.offered.items()} == {(0, 0), (1, 36), (2, 72)}
    assert [offered for offered, _ in seen.harbours] == [36, 72, 108]


@pytest.mark.parametrize("method", ["er", "a-gem"])
@pytest.mark.parametrize("kind", STREAMS)
def test_memory_holds_indices_of_training_images_of_tasks_that_were_met(method, kind):
    stream = STREAMS[kind]
    seen = MemoryOfEachEpoch()
    Fleet([spec_for(method, stream, seed, memory=12) for seed in (0, 1)], stream).run(seen)
    met: set[int] = set()
    for task, (_, kept) in zip(stream.tasks, seen.harbours, strict=True):
        met |= set(task.train.tolist())
        assert kept.dtype == torch.int64
        assert kept.shape == (2, 12)
        for row in kept.tolist():
            assert len(set(row)) == 12
            assert set(row) <= met


def test_a_step_may_draw_more_than_it_takes():
    memory = Reservoir([0, 1], 50)
    memory.offer(torch.arange(40).expand(2, 40))
    drawn = memory.plan(torch.arange(30).expand(2, 30), [10, 10, 10], offer=False, count=25)
    assert [each.shape for each in drawn] == [(2, 25)] * 3
    assert all(len(set(row.tolist())) == 25 for each in drawn for row in each)
