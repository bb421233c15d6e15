"""The methods: each trains a run at a value of its dial."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import mooring
from language_models.evaluation import divergence, predictions
from language_models.texts import Batch, without_labels
from language_models.training import ADAPTER_ALPHA, ADAPTER_RANK, Run
from mooring.errors import ReturnedWarning


def plain(run: Run, rate: float) -> None:
    """Fine-tune and nothing else; the dial is the learning rate."""
    run.rate = rate
    run.train()


def kl_by_hand(run: Run, weight: float) -> None:
    """Add the divergence from the original model on a whole batch of the reference to each step, times the weight."""

    def penalty(step: int) -> Tensor:
        batch = run.old_batch(step)
        original = run.original_logits(batch)
        return weight * divergence(original, run.model(**without_labels(batch)).logits, batch["attention_mask"])

    run.train(penalty)


def moored(run: Run, nats: float) -> None:
    """Mooring with a budget in nats and its default options; the reference has no labels."""
    reference = [without_labels(batch) for batch in run.problem.reference]
    options: dict[str, Any] = {"pull": mooring.Budget(nats), "reference": reference, "batches": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        moor = mooring.attach(run.model, run.optimizer, progress=False, **options)
        run.train()
        run.gauge = moor.finish().nats
        moor.detach()
    run.returned = any(issubclass(warning.category, ReturnedWarning) for warning in caught)


def replay(run: Run, weight: float) -> None:
    """Add the loss on the answers of a whole batch of the reference to each step, times the weight."""
    run.train(lambda step: weight * run.model(**run.old_batch(step)).loss)


def wise_ft(run: Run, part: float) -> None:
    """WiSE-FT: fine-tune, then interpolate with the original weights; at 1 they are the fine-tuned ones.

    Dials of one seed share the training.
    """
    shared = run.problem.shared
    if shared.get("wise-ft", (None,))[0] != run.seed:
        run.train()
        shared["wise-ft"] = run.seed, [p.detach().clone() for p in run.trained], run.train_seconds
    _, trained, run.shared_seconds = shared["wise-ft"]
    with torch.no_grad():
        for p, anchor, end in zip(run.trained, run.problem.original.parameters(), trained, strict=True):
            p.copy_(anchor.lerp(end, part))
    run.shared_seconds -= run.train_seconds


def asft(run: Run, weight: float) -> None:
    """ASFT: weigh each token's loss by its probability, and add the divergence from the original model, on new inputs.

    L = mean(-sg(q(y)) log q(y)) + weight * mean(KL(original || model)), over the tokens of the answers, as in Anchored
    Supervised Fine-Tuning (arXiv 2509.23753) and its code, github.com/zhuchichi56/ASFT. It reads no old data.
    LLaMA-Factory's `asft_alpha`, which is this weight, is 0.1 by default.
    """

    def loss_of(model: Any, batch: Batch) -> Tensor:
        logits, labels = predictions(model, batch)
        losses = cross_entropy(logits.float(), labels, reduction="none")
        learned = batch["labels"][:, 1:] >= 0
        anchor = divergence(run.original_logits(batch)[:, :-1][learned], logits, torch.ones_like(labels))
        return (losses.detach().neg().exp() * losses).mean() + weight * anchor

    run.train(loss_of=loss_of)


def l2_sp(run: Run, strength: float) -> None:
    """L2-SP: add half the squared distance from the original weights, times the strength."""
    anchors = [p.detach().clone() for p in run.trained]

    def penalty(step: int) -> Tensor:
        moved = torch._foreach_sub(run.trained, anchors)
        return strength / 2 * torch.stack(torch._foreach_norm(moved)).square().sum()

    run.train(penalty)


def lora(**options: Any) -> Callable[[], Any]:
    """Return a function that makes PEFT's configuration of LoRA adapters on all linear layers but the head."""

    def configure() -> Any:
        from peft import LoraConfig

        return LoraConfig(r=ADAPTER_RANK, lora_alpha=ADAPTER_ALPHA, target_modules="all-linear", **options)

    return configure


def osf(part: float) -> Callable[[], Any]:
    """Return a function that makes PEFT's configuration of OSF.

    It freezes this part of the singular directions, the largest ones, and trains the others orthogonally to them.
    """

    def configure() -> Any:
        from peft import OSFConfig

        return OSFConfig(effective_rank=part, target_modules="all-linear")

    return configure


@dataclass(frozen=True)
class Method:
    """A method, the values of its dial with the most telling first, and adapters if it trains those."""

    train: Callable[[Run, float], None]
    dials: tuple[float, ...]
    adapters: Callable[[], Any] | None = None


METHODS = {
    "plain": Method(plain, (1e-4, 3e-5, 1e-5, 5e-5)),
    "mooring": Method(moored, (0.1, 0.03, 0.3)),
    "kl-by-hand": Method(kl_by_hand, (1.0, 0.3, 3.0)),
    "lora": Method(plain, (1e-3, 3e-4, 1e-4), lora()),
    "lora-mooring": Method(moored, (0.03, 0.1, 0.01), lora()),
    "lora-kl-by-hand": Method(kl_by_hand, (1.0, 0.3, 3.0), lora()),
    "wise-ft": Method(wise_ft, (0.5, 0.3, 0.7)),
    "replay": Method(replay, (1.0, 0.3)),
    "asft": Method(asft, (0.1, 1.0, 0.03)),
    "rslora": Method(plain, (3e-4, 1e-4, 1e-3), lora(use_rslora=True)),
    "l2-sp": Method(l2_sp, (0.01, 0.1, 1.0)),
    "osf": Method(plain, (1e-4, 3e-5, 3e-4), osf(0.5)),
}
"""The methods, the most important first."""
