"""A run with AdamW, or with a schedule, equals the run alone and a hand-written loop, for every family of methods."""

import pytest
import torch

from laboratory.small import class_stream, spec_for, trained_by_hand
from mooring_lab.fleet.fleet import Fleet

STREAM = class_stream()
EXACT = {"rtol": 1e-9, "atol": 1e-9}
SETTINGS = {
    "adamw": {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.1},
    "adamw, warm-up": {"optimizer": "adamw", "lr": 0.003, "weight_decay": 0.1, "schedule": "warmup-linear"},
    "sgd, warm-up": {"schedule": "warmup-linear"},
    "sgd, cosine": {"schedule": "cosine"},
}
ATTACHED = ["plain", "joint", "ewc", "clamped-ewc", "mas", "si", "rwalk", "explicit-ewc", "explicit-si", "proximal-ewc"]
ATTACHED += ["budget-ewc", "budget-kronecker", "l2-sp", "balanced-ewc"]


def weights(fleet: Fleet) -> list[dict[str, torch.Tensor]]:
    count = len(fleet.specs)
    fleet.run()
    return [fleet.stack.network_of(row).state_dict() for row in range(count)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", ATTACHED)
def test_run_equals_a_loop_with_attach(method: str, setting: str) -> None:
    spec = spec_for(method, STREAM, seed=3, **SETTINGS[setting])
    [actual] = weights(Fleet([spec], STREAM))
    torch.testing.assert_close(actual, trained_by_hand(spec, STREAM).state_dict(), **EXACT)
