"""Networks that people fine-tune, with random weights and real shapes, and their batches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import efficientnet_lite
import torch
from torch import Tensor, nn

LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32}
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
LLAMA_TINY = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2_TINY = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}
NARROW_STAGES = [(1, 3, 1, 1, 8), (2, 3, 2, 4, 8), (2, 5, 2, 4, 16), (2, 5, 1, 4, 16)]


@dataclass(frozen=True)
class Workload:
    """A model and the batches that it trains on.

    Attributes:
        build: makes the model, on torch's default device and in its default dtype.
        batch: makes a batch (inputs, labels) on the CPU from a generator.
        loss: the mean loss, loss(model, batch).
        dtype: the dtype of the parameters; adapters have float32.
        alone: whether two of them are too large for one GPU.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Any], Tensor]
    dtype: torch.dtype = torch.float32
    alone: bool = False

    def make(self, device: torch.device) -> nn.Module:
        """Return the model, made on a device: on the CPU seven billion random numbers take minutes."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                return self.build()
        finally:
            torch.set_default_dtype(default)


class SmallTensors(nn.Module):
    """A sum of many small linear layers: 2,000 tensors, whose work is far less than their kernel launches.

    Args:
        count: the number of tensors.
        width: the number of inputs and classes.
    """

    def __init__(self, count: int = 2000, width: int = 16) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(width, width) / (count * width) ** 0.5 for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the sum of all weights; the backward pass makes a gradient for each."""
        return torch.einsum("bi,tij->bj", x, torch.stack(list(self.weights)))


def with_adapters(model: nn.Module, targets: Any, rank: int = 16, *, transposed: bool = False) -> nn.Module:
    """Return a model with LoRA; of GPT-2 the weights are transposed."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, fan_in_fan_out=transposed)
    return get_peft_model(model, config)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of a classifier."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def next_token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross entropy of a language model's next tokens."""
    tokens, labels = batch
    logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def efficientnet(tiny: bool) -> nn.Module:
    """Return EfficientNet-Lite0 whose batch norms have the statistics of noise; a narrow one if tiny."""
    if tiny:
        with mock.patch.multiple(efficientnet_lite, STAGES=NARROW_STAGES, STEM=8, FEATURES=32):
            model: nn.Module = efficientnet_lite.EfficientNetLite0(classes=10)
    else:
        model = efficientnet_lite.EfficientNetLite0(classes=100)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model.train()(torch.randn(4, 3, 32, 32))
    for norm in norms:
        norm.momentum = 0.01
    return model.eval()


def gpt2(tiny: bool, dropout: float = 0.0) -> nn.Module:
    """Return GPT-2 with 124 M parameters; with two narrow layers if tiny."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = GPT2_TINY if tiny else {}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout))


def llama(sizes: dict[str, int], vocabulary: int, key_value_heads: int) -> nn.Module:
    """Return a Llama with these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocabulary, num_key_value_heads=key_value_heads))


def images(count: int, pixels: int, classes: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Return a function that makes batches of noise."""

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = torch.randn(count, 3, pixels, pixels, generator=generator)
        return noise, torch.randint(classes, (count,), generator=generator)

    return batch


def vectors(count: int, width: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Return a function that makes batches of noise, with a label for each vector."""

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        noise = torch.randn(count, width, generator=generator)
        return noise, torch.randint(width, (count,), generator=generator)

    return batch


def tokens(count: int, length: int, vocabulary: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Return a function that makes batches of random tokens, with the next ones as labels."""

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(vocabulary, (count, length + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return batch


def workload(name: str, *, tiny: bool = False) -> Workload:
    """Return the model and the batches of a name in `NAMES`; a miniature for a CPU if tiny."""
    if name.endswith(ADAPTED):
        base = workload(name.removesuffix(ADAPTED), tiny=tiny)
        gpt = name.startswith("gpt2")
        targets = ["c_attn"] if gpt else ["q_proj", "v_proj"]  # PEFT's default
        return replace(base, build=lambda: with_adapters(base.build(), targets, transposed=gpt))
    if name == "efficientnet":
        batch = images(2, 32, 10) if tiny else images(64, 224, 100)
        return Workload(lambda: efficientnet(tiny), batch, cross_entropy)
    if name == "many-tensors":
        return Workload(lambda: SmallTensors(20 if tiny else 2000), vectors(64, 16), cross_entropy)
    if name == "gpt2":
        batch = tokens(2, 16, 100) if tiny else tokens(8, 1024, 50257)
        return Workload(lambda: gpt2(tiny), batch, next_token_loss)
    batch = tokens(2, 16, 100) if tiny else tokens(4, 1024, 32000)
    sizes, heads = (LLAMA_1B, 4) if name == "llama-1b" else (LLAMA_7B, 32)
    if tiny:
        sizes, heads = LLAMA_TINY, 4
    build, alone = partial(llama, sizes, 100 if tiny else 32000, heads), name == "llama-7b"
    return Workload(build, batch, next_token_loss, torch.bfloat16, alone)


ADAPTED = "-lora"
"""The end of the name of a model with LoRA."""

NAMES = ("efficientnet", "gpt2", "gpt2-lora", "llama-1b", "llama-1b-lora", "llama-7b", "llama-7b-lora", "many-tensors")
