"""Tests that what Mooring promises holds for every model of the zoo, with every importance and pull that fits."""

import random

import numpy
import pytest
import torch

from library.zoo.models import MODELS, ZooModel
from library.zoo.moored_runs import IMPORTANCES, MooredRun, clean_name, flat, saved_energy
from mooring import Budget, Interpolation, Penalty, Proximal

FAST = ("gpt2", "clip", "lora", "resnet", "gan", "scalar parameter")
"""The models of the required suite, with their first rule."""

PULLS = {
    "interpolation": Interpolation(),
    "penalty": Penalty(1.0),
    "proximal": Proximal(1.0),
    "budget of nothing": Budget(1e-36),  # where a bias has more outputs than samples, its curvature is 1e-17 along some
    "proximal of 1e30": Proximal(1e30),
}
BUDGETS = [(importance, "budget") for importance in IMPORTANCES]
OTHERS = [("mas", "interpolation"), ("si", "interpolation"), ("uniform", "penalty"), ("rwalk", "proximal")]
ESTIMATED = [(importance, "budget") for importance in ("kronecker", "ewc", "mas", "uniform", "balanced")]
HOLDING = [(importance, "budget of nothing") for importance, _ in ESTIMATED] + [("ewc", "proximal of 1e30")]

pytestmark = pytest.mark.filterwarnings(
    "ignore:training moves parameters that nothing holds",
    r"ignore:Budget\(.*\) has no reference and the model was trained before",  # a first task of adapters
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # torch.compile, where a hook divides a graph
)


def cases(rules, models=MODELS, fast=FAST):
    """Parametrize over models and rules; all but the first rule of a few models are for the long half."""
    chosen = [(zoo, rule, zoo.name in fast and rule == rules[0]) for zoo in models for rule in rules]
    return pytest.mark.parametrize(
        ("zoo", "importance", "pull"),
        [
            pytest.param(zoo, *rule, id="-".join((zoo.name, *rule)), marks=() if fast else pytest.mark.faults)
            for zoo, rule, fast in chosen
        ],
    )


def new_run(zoo: ZooModel, **options) -> MooredRun:
    pytest.importorskip(zoo.needs, reason=f"needs {zoo.needs}")
    return MooredRun(zoo, **options)


def rules(zoo: ZooModel, importance: str, pull: str) -> dict:
    return {"importance": IMPORTANCES[importance], "pull": ({"budget": Budget(zoo.nats)} | PULLS)[pull]}


def moved(run: MooredRun, before: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest change of each parameter, or of s B A for the factors of a product that is held as one."""
    now = run.values()
    changes = {name: float((p - before[name]).abs().max()) for name, p in now.items()}
    for (a, b), scale in run.products().items():
        product, old = (scale * values[b] @ values[a] for values in (now, before))
        changes[a] = changes[b] = float((product - old).abs().max())
    return changes


def set_trainable(parameters: list[torch.nn.Parameter], trainable: bool) -> None:
    for p in parameters:
        p.requires_grad_(trainable)


def everything(run: MooredRun) -> dict[str, torch.Tensor]:
    """Return parameters, buffers, gradients, modes and random states."""
    modes = {f"mode.{name}": torch.tensor(module.training) for name, module in run.model.named_modules()}
    gradients = {f"gradient.{name}": p.grad.clone() for name, p in run.named().items() if p.grad is not None}
    values = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    drawn = torch.tensor([hash(random.getstate()), hash(str(numpy.random.get_state()[1:]))])
    return {**values, **gradients, **modes, "random": torch.get_rng_state(), "other random": drawn}


@cases(ESTIMATED, fast=("resnet", "gan", "scalar parameter"))
def test_reference_leaves_everything_as_it_is_to_the_bit(zoo, importance, pull):
    run = new_run(zoo)
    run.train(0, 1)  # gradients, and statistics that are not those of a new model
    next(run.model.modules()).train()
    list(run.model.modules())[-1].eval()
    before = everything(run)
    run.attach(**rules(zoo, importance, pull), reference=zoo.batches(0, 1))
    after = everything(run)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert {"unheld"}.isdisjoint(run.statuses().values())


@cases(HOLDING)
def test_parameters_that_move_under_a_budget_of_nothing_are_those_that_coverage_names(zoo, importance, pull):
    run = new_run(zoo, momentum=0.0)
    late, excluded = [], []  # in each part, one parameter trains only later, and another is excluded
    for module in run.modules:
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        late += [module.get_parameter(names[0])] if names[2:] else []
        excluded.append([clean_name(names[-1])] if names[2:] else [])
    set_trainable(late, False)
    run.attach(**rules(zoo, importance, pull), exclude=excluded)
    run.train(0, 6)
    run.consolidate()
    set_trainable(late, True)
    before = run.values()
    run.train(1, 4)
    statuses = run.statuses()
    free = {name for name, status in statuses.items() if status in ("unheld", "free by request")}
    factors = {name for names in run.products() for name in names}
    with_product = [p for name, p in run.named().items() if name in factors and any(p is other for other in late)]
    assert len(free) == len(late) - len(with_product) + sum(map(len, excluded))
    assert "held" in statuses.values()
    assert {name for name, distance in moved(run, before).items() if distance > 1e-9} == free


@cases([("ewc", "budget"), ("kronecker", "budget"), ("mas", "budget")], [zoo for zoo in MODELS if zoo.needs == "peft"])
def test_adapters_with_a_curvature_are_held_through_their_product(zoo, importance, pull):
    run = new_run(zoo).attach(**rules(zoo, importance, pull))
    run.train(0, 1)
    run.consolidate()
    expected = {"lora": 4, "dora": 4}.get(zoo.name, 0) if importance != "mas" else 0  # q_proj and v_proj of two layers
    assert len(run.products()) == expected


@cases([("ewc", "budget")])
def test_samples_are_the_predictions_that_the_loss_averages_over(zoo, importance, pull):
    run = new_run(zoo).attach(
        **rules(zoo, importance, pull), adapters="parameters"
    )  # a product has factors, no samples
    run.train(0, 1)
    for moor, module, predictions in zip(run.moors, run.modules, zoo.predictions, strict=True):
        squares = sum(p.grad.square().sum() for p in module.parameters() if p.grad is not None)
        assert float(sum(score.sum() for score in moor.current.values())) == pytest.approx(predictions * float(squares))


@cases(BUDGETS)
def test_energy_recomputed_from_the_saved_state_is_within_the_budget(zoo, importance, pull):
    run = new_run(zoo).attach(**rules(zoo, importance, pull))
    for task in (0, 1):
        run.train(task, 6)
        run.consolidate()
    run.train(2, 4)
    spent = 0.9 if pull == "budget" and not run.products() else 0.3  # not every layer or product spends its share
    for moor in run.moors:
        budget, energy = moor.pull.allowed(2), saved_energy(moor)
        assert spent * budget <= energy <= budget
        assert energy == pytest.approx(moor.pull_energy(), rel=1e-5)


@cases(BUDGETS + OTHERS)
def test_run_resumed_in_the_middle_of_a_task_equals_the_uninterrupted_one(zoo, importance, pull):
    run = new_run(zoo).attach(**rules(zoo, importance, pull))
    run.train(0, 4)
    run.consolidate()
    run.train(1, 2)
    saved = run.checkpoint()
    resumed = new_run(zoo).attach(**rules(zoo, importance, pull))
    resumed.load(saved)
    for continued in (run, resumed):
        continued.train(1, 2, start=2)
        continued.consolidate()
        continued.train(2, 1)
    whole, other = flat(run.checkpoint()), flat(resumed.checkpoint())
    assert whole.keys() == other.keys()
    assert [name for name in whole if not torch.equal(whole[name], other[name])] == []


@cases(BUDGETS + OTHERS, [zoo for zoo in MODELS if zoo.splits])
def test_accumulated_gradients_equal_those_of_one_batch(zoo, importance, pull):
    runs = [new_run(zoo).attach(**rules(zoo, importance, pull), buffers="frozen") for _ in range(2)]
    for run, pieces in zip(runs, (1, 2), strict=True):
        run.train(0, 4)
        run.consolidate()  # batch norm does not depend on the batch from here on
        run.train(1, 3, pieces=pieces)
    whole, accumulated = (flat(run.checkpoint()) for run in runs)
    for name in whole.keys() - {name for name in whole if name.endswith(".mooring")}:
        difference = (accumulated[name].double() - whole[name].double()).norm()
        assert difference <= 1e-4 * whole[name].double().norm() + 1e-12, name  # losses of transformers are in float32


@cases(BUDGETS + OTHERS, [zoo for zoo in MODELS if zoo.casts])
def test_autocast_steps_stay_within_a_twentieth_of_plain_ones_and_within_the_budget(zoo, importance, pull):
    options = {"dtype": torch.float32, "lr": 0.01, "momentum": 0.0}
    runs = [new_run(zoo, **options).attach(**rules(zoo, importance, pull)) for _ in range(2)]
    start = runs[0].values()
    for run, autocast in zip(runs, (False, True), strict=True):
        run.train(0, 4, autocast=autocast)
        run.consolidate()
        run.train(1, 4, autocast=autocast)
    plain, cast = (run.values() for run in runs)
    apart, distance = (
        sum(float((one[name] - other[name]).square().sum()) for name in start)
        for one, other in ((cast, plain), (plain, start))
    )
    assert apart <= 0.05**2 * distance
    for moor in runs[1].moors if pull.startswith("budget") else ():
        assert saved_energy(moor) <= 1.01 * moor.pull.allowed(1)  # float32 rounds weights after the pull
