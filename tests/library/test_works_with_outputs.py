"""Tests of observed outputs: found in what a model returns, and counted only if they were trained on."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import mooring
from by_hand import (
    F64,
    Batches,
    ByHand,
    check,
    close,
    draw_most_likely,
    identical,
    make_batches,
    network,
    one_line,
    pair,
    sgd,
    states,
)
from mooring import EWC, MAS
from mooring.errors import MooringError
from mooring.rules import Importance, Kronecker


@dataclasses.dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Opaque:
    def __init__(self, loss: Tensor, logits: Tensor) -> None:
        self.loss, self.logits = loss, logits


class Returning(nn.Sequential):
    """A model that computes its own loss, as language models do, and returns it with the logits."""

    form: Callable[[Tensor, Tensor], Any]

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return self.form(logits.sin().mean(), logits)


def returning(form: Callable[[Tensor, Tensor], Any]) -> Returning:
    model = Returning(*network())
    model.form = form
    return model


def learn_from_returned_loss(
    form: Callable[[Tensor, Tensor], Any],
    loss_of: Callable[[Any], Tensor],
    seen: Callable[[Tensor], Tensor] = lambda logits: logits,
    **options: Any,
) -> None:
    """Train two tasks on the loss that a model returns, moored and with the oracle; `seen` is what MAS should read."""
    model, hand_model = returning(form), network()
    moor = mooring.attach(model, sgd(model), importance=MAS(), **options)
    hand = ByHand(hand_model, sgd(hand_model), "mas", "interpolation")
    hand.outputs = seen
    for task in (1, 2):
        for x, _ in make_batches(task):
            model.zero_grad()
            loss_of(model(x)).backward()
            moor.optimizer.step()
            hand_model.zero_grad()
            hand.observe(x)
            hand_model(x).sin().mean().backward()
            hand.step()
        if task == 1:
            moor.consolidate()
            hand.consolidate()
    for ours, theirs in zip(model.parameters(), hand_model.parameters(), strict=True):
        close(ours, theirs)
    for name, score in hand.current.items():
        close(moor.current[name], score)
        assert score.any()


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda loss, logits: logits, lambda returned: returned.sin().mean()),
    "tuple": (lambda loss, logits: (loss, logits), lambda returned: returned[0]),
    "tuple, loss outside": (lambda loss, logits: (loss, logits), lambda returned: returned[1].sin().mean()),
    "list": (lambda loss, logits: [logits, loss], lambda returned: returned[1]),
    "dict": (lambda loss, logits: {"loss": loss, "logits": logits}, lambda returned: returned["loss"]),
    "dataclass": (Output, lambda returned: returned.loss),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_are_found_in_what_a_model_returns(form: str) -> None:
    learn_from_returned_loss(*FORMS[form])


@pytest.mark.parametrize(
    "form",
    [
        Opaque,
        lambda loss, logits: {"loss": loss, "scores": logits},
        lambda loss, logits: (loss,),
        lambda loss, logits: loss,
        lambda loss, logits: None,
    ],
)
def test_unknown_outputs_are_refused_with_a_hint(form: Callable[[Tensor, Tensor], Any]) -> None:
    model = returning(form)
    optimizer = sgd(model)  # keeps the Mooring alive
    mooring.attach(model, optimizer, importance="mas")
    with pytest.raises(MooringError, match="outputs=") as error:
        model(make_batches(1)[0][0])
    assert one_line(error)


@pytest.mark.parametrize("form", [Opaque, Output, lambda loss, logits: {"loss": loss, "scores": logits}])
@pytest.mark.parametrize(
    "seen", [lambda logits: logits, lambda logits: logits[:, :2], lambda logits: logits.log_softmax(-1)]
)
def test_outputs_function_is_used(form: Callable[[Tensor, Tensor], Any], seen: Callable[[Tensor], Tensor]) -> None:
    def logits(returned: Any) -> Tensor:
        return returned["scores"] if isinstance(returned, dict) else returned.logits

    def loss(returned: Any) -> Tensor:
        return returned["loss"] if isinstance(returned, dict) else returned.loss

    learn_from_returned_loss(form, loss, seen, outputs=lambda returned: seen(logits(returned)))


@pytest.mark.parametrize("importance", ["mas", "per sample", "sampled"])
def test_evaluation_is_not_counted(importance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "multinomial", draw_most_likely)
    aside = make_batches(5, count=1)[0][0]

    def train_and_evaluate(moor: mooring.Mooring, batches: Batches) -> None:
        for x, y in batches:
            moor.optimizer.zero_grad()
            moor.model(aside)  # an evaluation without no_grad
            outputs = moor.model(x)
            moor.model(aside)
            mse_loss(outputs, y).backward()
            moor.model(aside)
            with torch.no_grad():
                moor.model(aside)
            with torch.inference_mode():
                moor.model(aside)
            moor.optimizer.step()
            moor.model(aside)

    moor, hand = pair(importance=importance)
    check(moor, hand, train_and_evaluate)


@pytest.mark.parametrize("importance", ["mas", "per sample", "sampled"])
def test_step_without_a_forward_pass_of_the_model_is_refused(importance: str) -> None:
    moor, _ = pair(importance=importance)
    before = states(moor.model)
    x, y = make_batches(1)[0]
    first, act, last = moor.model
    mse_loss(last(act(first(x))), y).backward()
    with pytest.raises(MooringError, match="call the model itself") as error:
        moor.optimizer.step()
    assert one_line(error)
    assert identical(states(moor.model), before)
    assert moor.steps == 0


def test_attaching_to_the_compiled_model_is_advised_where_its_outputs_are_not_seen() -> None:
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled(torch.ones(4, 3)).sum().backward()
    moor = mooring.attach(model, optimizer, pull=mooring.Budget(0.1))
    compiled(torch.ones(4, 3)).sum().backward()
    with pytest.raises(MooringError, match=r"of a compiled model attach the one that torch.compile returned") as error:
        optimizer.step()
    assert one_line(error)
    moor.detach()
    moor = mooring.attach(compiled, optimizer, pull=mooring.Budget(0.1))
    compiled(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    assert moor.steps == 1


def step_and_expect_one_batch(moor, x):
    """Take a step, and check that MAS is that of this batch alone."""
    expected = torch.autograd.grad(moor.model(x).square().sum(), list(moor.model.parameters()))
    moor.optimizer.step()
    for current, gradient in zip(moor.current.values(), expected, strict=True):
        close(current, gradient.abs())


def test_parameters_that_share_a_gradient_tensor_accumulate_separately():
    """autograd may return the same tensor for both terms of a + b; an in-place sum would add twice."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3, dtype=F64)), nn.Parameter(torch.zeros(3, dtype=F64))

        def forward(self, x):
            return x * (self.a + self.b)

    model = Sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, importance=MAS(decay=0.0))
    halves = torch.randn(2, 4, 3, dtype=F64)
    for half in halves:
        model(half).sum().backward()
    optimizer.step()
    expected = (2 * halves.square().sum((0, 1)) * (model.a + model.b)).abs().detach()
    close(moor.current["a"], expected)
    close(moor.current["b"], expected)


def test_gradient_of_inputs_is_not_counted_but_the_later_loss_is():
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, importance=MAS(decay=0.0))
    x, y = make_batches(0)[0]
    x.requires_grad_()
    outputs = model(x)
    torch.autograd.grad(outputs.sum(), x, retain_graph=True)  # a saliency map
    torch.autograd.grad(model(x).sum(), x)  # an adversarial step
    mse_loss(outputs, y).backward()
    step_and_expect_one_batch(moor, x)


def test_samples_are_discarded_while_no_moored_parameter_is_trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, importance=EWC(decay=0.0, per_sample=True), exclude="1")
    x, y = make_batches(0)[0]
    model[0].requires_grad_(False)
    for _ in range(5):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
    close(moor.current["0.weight"], len(x) * model[0].weight.grad.square())


def test_linear_probing_with_mas_trains_the_head():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).double()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    moor = mooring.attach(model, optimizer, importance="mas", exclude="1")
    x, y = make_batches(0)[0]
    before = model[1].weight.detach().clone()
    mse_loss(model(x), y).backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    assert moor.anchor == {}


def test_copy_of_the_model_is_not_observed(tmp_path):
    model = network()
    optimizer = sgd(model)
    moor = mooring.attach(model, optimizer, importance="mas", outputs=lambda out: out)
    hand_model = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    for copied in (hand_model, saved):
        copied(make_batches(0)[0][0]).sum().backward()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(MooringError, match="saw no outputs"):
        optimizer.step()
    for refused in (copy.deepcopy, copy.copy):
        with pytest.raises(MooringError, match="cannot be"):
            refused(moor)


def test_backward_pass_after_a_failed_one_is_counted():
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, importance=MAS(decay=0.0))
    x, y = make_batches(0)[0]

    def fail(gradient):
        raise KeyboardInterrupt

    loss = mse_loss(model(x), y)
    handle = model[0].weight.register_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    handle.remove()
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    step_and_expect_one_batch(moor, x)


def per_sample(model: nn.Module) -> mooring.Mooring:
    return mooring.attach(model, torch.optim.SGD(model.parameters(), lr=0.0), importance=EWC(None, per_sample=True))


def check_samples(moor: mooring.Mooring, loss: Tensor, samples: int) -> None:
    """Check that a step on this mean loss sees so many samples."""
    moor.optimizer.zero_grad()
    loss.backward()
    moor.optimizer.step()
    assert moor.steps == 1
    for name, p in moor.model.named_parameters():
        assert p.grad.any()
        close(moor.current[name], samples * p.grad.square())


@pytest.mark.parametrize("ignored", [0, 70])
def test_samples_of_dense_outputs_are_the_pixels_that_count(ignored: int) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 3, padding=1).double()
    x, labels = torch.randn(4, 2, 6, 5, dtype=F64), torch.randint(3, (4, 6, 5))
    labels.view(-1)[:ignored] = -100
    check_samples(per_sample(model), cross_entropy(model(x), labels), 4 * 6 * 5 - ignored)


class Shaped(nn.Linear):
    """A layer whose outputs (B, T, C) are brought into another shape."""

    def __init__(self, shape: Callable[[Tensor], Tensor]) -> None:
        super().__init__(5, 3, dtype=F64)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        return self.shape(super().forward(x))


@pytest.mark.parametrize(
    ("shape", "classes"),
    [
        (lambda outputs: outputs, 2),
        (lambda outputs: outputs.mT, 1),
        (lambda outputs: outputs.unflatten(1, (4, 2)), 3),
        (lambda outputs: outputs.mT.unflatten(2, (4, 2)), 1),
    ],
)
def test_samples_are_the_positions_wherever_the_classes_are(shape: Callable[[Tensor], Tensor], classes: int) -> None:
    torch.manual_seed(0)
    model = Shaped(shape)
    moor = per_sample(model)
    outputs = model(torch.randn(2, 8, 5, dtype=F64)).movedim(classes, -1).reshape(-1, 3)
    check_samples(moor, cross_entropy(outputs, torch.randint(3, (16,))), 16)


def test_importance_does_not_change_with_padding() -> None:
    torch.manual_seed(0)
    ids, scores = torch.randint(7, (3, 4)), []
    for length in (4, 16):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)).double()
        padded = torch.zeros(3, length, dtype=torch.long)
        padded[:, :4] = ids
        labels = torch.where(torch.arange(length) < 4, padded, -100)
        moor = per_sample(model)
        cross_entropy(model(padded).flatten(0, 1), labels.flatten()).backward()
        moor.optimizer.step()
        scores.append(moor.current)
    for name, score in scores[0].items():
        close(scores[1][name], score)


class MaskedModel(nn.Sequential):
    """A masked language model that computes its own loss, as those of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        logits = super().forward(ids)
        return Output(cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


@pytest.mark.parametrize("importance", [EWC(None, per_sample=True), Kronecker()], ids=repr)
def test_samples_of_a_masked_language_model_are_the_masked_tokens(importance: Importance) -> None:
    torch.manual_seed(0)
    model = MaskedModel(nn.Embedding(7, 5), nn.Linear(5, 7)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    moor = mooring.attach(model, optimizer, importance=importance, pull=mooring.Budget(0.1))
    labels = torch.full((3, 20), -100)
    labels[:, :3] = 2
    model(torch.randint(7, (3, 20)), labels).loss.backward()
    optimizer.step()
    close(moor.current["0.weight"], 9 * model[0].weight.grad.square())


def test_all_outputs_count_where_a_zero_gradient_does_not_tell() -> None:
    """A certain prediction of one class, and a loss of exactly 0, have no gradient but belong to the mean."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    x = torch.randn(8, 3, dtype=F64)
    x[:5] = 99 * model.weight.detach().sign()
    check_samples(per_sample(model), binary_cross_entropy_with_logits(model(x), torch.ones(8, 1, dtype=F64)), 8)
    model = nn.Linear(3, 2).double()
    moor = per_sample(model)
    (0 * model(x)).sum().backward()
    moor.optimizer.step()
    assert moor.steps == 1


def test_certain_predictions_of_several_classes_are_counted() -> None:
    model = nn.Linear(2, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[40.0, 0.0], [0.0, 40.0]]))
    x = torch.eye(2, dtype=F64).repeat(4, 1)
    check_samples(per_sample(model), cross_entropy(model(x), x.argmax(-1)), 8)


class TokenModel(nn.Module):
    """A language model that returns its loss, with logits or, with a fused head, without."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.fused = nn.Embedding(7, 4), nn.Linear(4, 7), fused

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss} if self.fused else {"loss": loss, "logits": logits}


def test_samples_are_counted_without_logits():
    scores = []
    for fused in (False, True):
        model = TokenModel(fused)
        optimizer = sgd(model)
        moor = mooring.attach(model, optimizer, importance=EWC(decay=None, per_sample=True))
        ids = torch.arange(15).view(3, 5) % 7
        model(input_ids=ids, labels=(ids + 1) % 7)["loss"].backward()
        optimizer.step()
        scores.append(moor.current)
    torch.testing.assert_close(*scores, rtol=0, atol=0)


def test_labels_that_the_loss_ignores_are_not_counted_without_logits():
    scores = []
    for padding in (0, 6):
        model = TokenModel(fused=True)
        optimizer = sgd(model)
        moor = mooring.attach(model, optimizer, importance=EWC(decay=None, per_sample=True))
        ids = torch.arange(15).view(3, 5) % 7
        labels = nn.functional.pad((ids + 1) % 7, (0, padding), value=-100)
        model(input_ids=nn.functional.pad(ids, (0, padding)), labels=labels)["loss"].backward()
        optimizer.step()
        scores.append(moor.current)
    torch.testing.assert_close(*scores)


def test_importance_that_reads_outputs_names_one_that_does_not_without_logits():
    model = TokenModel(fused=True)
    optimizer = sgd(model)  # keeps the Mooring alive
    mooring.attach(model, optimizer, importance="mas")
    ids = torch.zeros(2, 3, dtype=torch.long)
    with pytest.raises(MooringError, match=r"cannot find the outputs in the dict .* reads no outputs, such as EWC\(\)"):
        model(input_ids=ids, labels=ids)
