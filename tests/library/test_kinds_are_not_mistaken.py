"""Ordinary losses and outputs that look like another kind than they are."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import mooring

SIZE = 8


def ask(
    model: nn.Module, targets: Tensor, criterion: Callable[..., Tensor], new: Tensor, **options: Any
) -> tuple[list[str], mooring.Mooring]:
    """Attach a model with a reference and take one step; return the warnings."""
    x = torch.randn(len(targets), SIZE, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    reference = list(zip(x.split(32), targets.split(32), strict=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moor = mooring.attach(model, optimizer, reference=reference, progress=False, **options)
        criterion(model(torch.randn(len(new), SIZE)), new).backward()
        optimizer.step()
    return [str(w.message) for w in caught], moor


def test_log_probabilities_with_a_negative_log_likelihood_are_classes():
    model = nn.Sequential(nn.Linear(SIZE, 5), nn.LogSoftmax(1))
    warned, moor = ask(model, torch.randint(5, (160,)), functional.nll_loss, torch.randint(5, (16,)))
    assert not warned
    assert moor._meter.loss_scale.value == pytest.approx(1)
    _, moor = ask(
        copy.deepcopy(model),
        torch.randint(5, (160,)),
        functional.nll_loss,
        torch.randint(5, (16,)),
        loss=lambda m, b: functional.nll_loss(m(b[0]), b[1]),
    )
    assert "outputs='classes'" in repr(moor)


@pytest.mark.parametrize(("criterion", "shift"), [(functional.l1_loss, -20), (functional.smooth_l1_loss, -10)])
def test_absolute_errors_far_from_zero_are_no_labels(criterion, shift):
    model = nn.Linear(SIZE, 1)
    with torch.no_grad():
        model.bias -= 20
    warned, moor = ask(model, 5 * torch.randn(160, 1) - 20, criterion, torch.randn(16, 1) + shift)
    assert not warned
    assert "outputs='values'" in repr(moor)


@pytest.mark.parametrize("labels", [1, 5])
def test_probabilities_of_labels_are_noticed(labels):
    model = nn.Sequential(nn.Linear(SIZE, labels), nn.Sigmoid())
    targets, new = (torch.randint(2, (count, labels)).float() for count in (160, 16))
    (warned, *_), _ = ask(model, targets, functional.binary_cross_entropy, new)
    assert "probabilities of labels" in warned


def test_values_in_different_units_are_all_protected():
    outputs, targets = torch.randn(64, 2) * torch.tensor([3e2, 1e-2]), torch.randn(64, 2) * torch.tensor([3e2, 1e-2])
    variance = mooring.kinds.Values().fitted([outputs], [targets]).variance
    torch.testing.assert_close(variance, (outputs - targets).square().mean(0))
    exact = mooring.kinds.Values().fitted([outputs], [outputs + 1e-9]).variance
    torch.testing.assert_close(exact, 1e-3 * outputs.var(0, correction=0))


def test_references_with_empty_texts_are_measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20))
    ids = torch.randint(1, 20, (64, 7))
    ids[::4] = 0  # also the first batch that is measured
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    moor = mooring.attach(model, optimizer, reference=list(ids.split(1)), batches=64, progress=False)
    for _ in range(20):
        optimizer.zero_grad()
        functional.cross_entropy(model(ids[1:3]).flatten(0, 1), ids[1:3].flatten()).backward()
        optimizer.step()
    assert moor._meter.distillation.weight < 10
    assert moor.finish().nats < 0.1


def test_coordinates_are_values_under_a_loss_of_distances():
    model = nn.Sequential(nn.Linear(SIZE, 15), nn.Unflatten(1, (5, 3)))

    def distances(y: Tensor, t: Tensor) -> Tensor:
        return (torch.cdist(y, y) - torch.cdist(t, t)).square().mean()

    warned, moor = ask(model, torch.randn(160, 5, 3), distances, torch.randn(16, 5, 3))
    assert not warned
    assert "outputs='values'" in repr(moor)


def test_density_as_a_loss_is_in_nats():
    def density(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean() - 9

    warned, _ = ask(nn.Linear(SIZE, 2), torch.randn(160, 2), functional.mse_loss, torch.randn(16, 2), loss=density)
    assert not any("name one in its unit" in text for text in warned)


def test_masks_of_a_single_channel_are_labels():
    model = nn.Sequential(nn.Linear(SIZE, 16), nn.Unflatten(1, (1, 4, 4)))
    masks = torch.randint(2, (160, 4, 4))
    _, moor = ask(
        model, masks, lambda y, t: functional.binary_cross_entropy_with_logits(y[:, 0], t), torch.rand(16, 4, 4).round()
    )
    assert "outputs='labels'" in repr(moor)
