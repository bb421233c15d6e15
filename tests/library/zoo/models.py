"""Small models with random weights of the kinds that people train, each with its loss and batches of two tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WORDS, LENGTH, ROWS, WIDTH, CLASSES, SIZE = 12, 6, 8, 16, 4, 8
FLOAT = torch.float64
"""The dtype of models and batches, so that rounding hides nothing."""

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        name: its name.
        make: returns the model, the same one at each call.
        batches: (task, count) -> batches; tasks differ in their labels.
        predictions: the number of predictions of a batch that the loss of each part is a mean over.
        loss: the mean loss on a batch; None is the default one of a reference.
        outputs: takes what the model returns and gives its outputs, for importances that read them.
        parts: the submodules with an optimizer each; by default the model itself.
        splits: whether the loss on a batch is the mean of those on its halves.
        casts: whether it runs in bfloat16 on every CPU.
        needs: the library that it comes from.
        nats: a budget that training spends. Below it products of adapters that turn away return to their anchors.
    """

    name: str
    make: Callable[[], nn.Module]
    batches: Callable[[int, int], list[Batch]]
    predictions: tuple[int, ...]
    loss: Loss | None = None
    outputs: Callable[[Any], Tensor] | None = None
    parts: tuple[str, ...] = ("",)
    splits: bool = True
    casts: bool = True
    needs: str = "torch"
    nats: float = 1e-6


# Data


def generator(task: int) -> torch.Generator:
    return torch.Generator().manual_seed(task)


def token_ids(task: int, count: int, length: int = LENGTH) -> list[Tensor]:
    """Return sentences that begin anywhere and go up in steps of task + 1, with some noise: (ROWS, length) each."""
    g = generator(task)
    start = [torch.randint(WORDS, (ROWS, 1), generator=g) for _ in range(count)]
    noise = [torch.randint(3, (ROWS, length), generator=g) for _ in range(count)]
    return [(s + (task + 1) * torch.arange(length) + n) % WORDS for s, n in zip(start, noise, strict=True)]


def text(task: int, count: int) -> list[Batch]:
    return [{"input_ids": ids, "labels": ids} for ids in token_ids(task, count)]


def next_tokens(task: int, count: int) -> list[Batch]:
    return [(ids[:, :-1], ids[:, 1:]) for ids in token_ids(task, count)]


def masked_text(task: int, count: int) -> list[Batch]:
    """Return text of which each row has two masked tokens, so that halves of a batch have equal means."""
    batches = []
    for number, ids in enumerate(token_ids(task, count)):
        places = torch.arange(LENGTH).roll(number).expand(ROWS, LENGTH)
        masked = torch.stack([row.roll(index) for index, row in enumerate(places)]) < 2
        labels = ids.masked_fill(~masked, -100)
        batches.append({"input_ids": ids.masked_fill(masked, 0), "labels": labels})
    return batches


def translations(task: int, count: int) -> list[Batch]:
    return [{"input_ids": ids, "labels": (ids + task) % WORDS} for ids in token_ids(task, count)]


def images(task: int, count: int) -> list[Batch]:
    g, per_image = generator(task), (3, SIZE, SIZE)
    xs = [torch.randn(ROWS, *per_image, generator=g, dtype=FLOAT) for _ in range(count)]
    return [(x, torch.randint(CLASSES, (ROWS,), generator=g)) for x in xs]


def named_images(task: int, count: int) -> list[Batch]:
    return [{"pixel_values": x, "labels": y} for x, y in images(task, count)]


def label_maps(task: int, count: int) -> list[Batch]:
    g = generator(task)
    return [(x, torch.randint(CLASSES, (ROWS, SIZE, SIZE), generator=g)) for x, _ in images(task, count)]


def captions(task: int, count: int) -> list[Batch]:
    """Return images with text that ends with token 0, at which the text is read."""
    ends = torch.arange(LENGTH) == LENGTH - 1
    texts = [ids.clamp(min=1).masked_fill(ends, 0) for ids in token_ids(task, count)]
    both = zip(images(task, count), texts, strict=True)
    return [{"pixel_values": x, "input_ids": ids, "return_loss": True} for (x, _), ids in both]


def recordings(task: int, count: int) -> list[Batch]:
    g = generator(task)
    sounds = [torch.randn(ROWS, 4, 2 * LENGTH, generator=g, dtype=FLOAT) for _ in range(count)]
    return [{"input_features": s, "labels": y} for s, y in zip(sounds, token_ids(task, count), strict=True)]


def vectors(task: int, count: int) -> list[Batch]:
    g = generator(task)
    xs = [torch.randn(2 * ROWS, WIDTH, generator=g, dtype=FLOAT) for _ in range(count)]
    return [(x, torch.randint(CLASSES, (2 * ROWS,), generator=g)) for x in xs]


def tags(task: int, count: int) -> list[Batch]:
    return [(x, functional.one_hot((y + task) % CLASSES, CLASSES).to(FLOAT)) for x, y in vectors(task, count)]


def measurements(task: int, count: int) -> list[Batch]:
    return [(x, (x[:, :CLASSES] + task).sin()) for x, _ in vectors(task, count)]


# Models of transformers

TEXT = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
BLOCKS = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
SPREAD = {"initializer_range": 0.3}
"""Larger weights than usual: with those, attention hardly depends on queries and keys, whose importance is then 0."""
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    size = {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "n_positions": LENGTH}
    return GPT2LMHeadModel(GPT2Config(**size, **rates, **TEXT, **SPREAD))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {**BLOCKS, **TEXT, **SPREAD, "num_key_value_heads": 1, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**size))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    size = {**BLOCKS, **SPREAD, **NO_DROPOUT, "vocab_size": WORDS, "max_position_embeddings": LENGTH}
    return BertForMaskedLM(BertConfig(**size))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": WIDTH, "d_kv": 8, "d_ff": WIDTH, "num_layers": 2, "num_heads": 2, "vocab_size": WORDS}
    return T5ForConditionalGeneration(T5Config(**size, decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0))


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    words = {**BLOCKS, **TEXT, "max_position_embeddings": LENGTH}
    pixels = {**BLOCKS, "image_size": SIZE, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=words, vision_config=pixels, projection_dim=WIDTH))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    size = {**BLOCKS, **SPREAD, **NO_DROPOUT, "image_size": SIZE, "patch_size": 4, "num_labels": CLASSES}
    return ViTForImageClassification(ViTConfig(**size))


def whisper() -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sides = {"layers": 2, "attention_heads": 2, "ffn_dim": 2 * WIDTH}
    size = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()}
    places = {"max_source_positions": LENGTH, "max_target_positions": LENGTH, "num_mel_bins": 4}
    start = {"decoder_start_token_id": 0, "pad_token_id": 0}
    options = {**TEXT, **start, "d_model": WIDTH, "dropout": 0.0, "init_std": 0.3}
    return WhisperForConditionalGeneration(WhisperConfig(**size, **places, **options))


def adapted(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import peft

        small = {"task_type": "CAUSAL_LM"}
        low_rank = {**small, "r": 2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        configs = {
            "lora": lambda: peft.LoraConfig(**low_rank),
            "dora": lambda: peft.LoraConfig(**low_rank, use_dora=True),
            "ia3": lambda: peft.IA3Config(
                **small, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
            ),
            "prompt tuning": lambda: peft.PromptTuningConfig(**small, num_virtual_tokens=3),
        }
        return peft.get_peft_model(llama(), configs[kind]())

    return make


# Models of torch


class Translator(nn.Module):
    """`nn.Transformer` between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))
        options = {"dim_feedforward": WIDTH, "dropout": 0.0, "batch_first": True, "activation": "gelu"}
        self.body = nn.Transformer(WIDTH, 2, num_encoder_layers=2, num_decoder_layers=2, **options)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.places[: ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], dtype=x.dtype)
        return self.head(self.body(x, x, src_mask=mask, tgt_mask=mask, memory_mask=mask))


class Encoder(nn.Module):
    """`nn.TransformerEncoder`, with gradient checkpointing if asked for."""

    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0, batch_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.checkpointing = checkpointing

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if not self.checkpointing:
            return self.head(self.body(x))
        for layer in self.body.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.body = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids))[0])


class Residual(nn.Module):
    """A block whose output is added to its input."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class Excitation(nn.Module):
    """The squeeze and excitation of EfficientNet."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(functional.silu(self.down(x.mean((2, 3), keepdim=True)))).sigmoid()


class LayerScale(nn.Module):
    """The scale of each channel in ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * x


def classifier(*layers: nn.Module, channels: int) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


def convolution(ins: int, outs: int, size: int = 3, groups: int = 1) -> list[nn.Module]:
    """Return a convolution and its batch norm."""
    return [nn.Conv2d(ins, outs, size, padding=size // 2, groups=groups, bias=False), nn.BatchNorm2d(outs)]


def resnet() -> nn.Module:
    block = Residual(*convolution(8, 8), nn.Softplus(), *convolution(8, 8))
    return classifier(*convolution(3, 8), nn.Softplus(), block, nn.Softplus(), channels=8)


def convnext() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 2, stride=2), nn.GroupNorm(1, 8)]
    mixing = [nn.Conv2d(8, 8, 7, padding=3, groups=8), nn.GroupNorm(1, 8)]
    block = Residual(*mixing, nn.Conv2d(8, 16, 1), nn.GELU(), nn.Conv2d(16, 8, 1), LayerScale(8))
    return classifier(*stem, block, channels=8)


def efficientnet() -> nn.Module:
    depthwise = [*convolution(16, 16, groups=16), nn.SiLU(), Excitation(16)]
    block = Residual(*convolution(8, 16, 1), nn.SiLU(), *depthwise, *convolution(16, 8, 1))
    return classifier(*convolution(3, 8), nn.SiLU(), block, channels=8)


def segmentation() -> nn.Module:
    down = [*convolution(3, 8), nn.SiLU(), nn.Conv2d(8, 8, 2, stride=2), nn.SiLU()]
    return nn.Sequential(*down, nn.ConvTranspose2d(8, 8, 2, stride=2), nn.SiLU(), nn.Conv2d(8, CLASSES, 1))


def mlp(*, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer) -> nn.Sequential:
    hidden = wrap(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), hidden, nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def shared() -> nn.Module:
    """Return a network with one layer used twice, and one whose weight another layer shares."""
    model = mlp()
    model.insert(3, model[2])
    tied = nn.Linear(WIDTH, WIDTH)
    tied.weight = model[0].weight
    model.insert(2, tied)
    return model


class Tempered(nn.Module):
    """A network whose outputs are divided by a temperature, a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.temperature = mlp(), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.temperature.exp()


class UnitVectors(nn.Module):
    """A network whose outputs are vectors of norm 1."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(self.body(x), dim=1)


def tag_loss(model: nn.Module, batch: Batch) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


def distance(model: nn.Module, batch: Batch) -> Tensor:
    """Return how far embeddings are from those of their group, which are fixed."""
    groups = torch.eye(CLASSES, dtype=batch[0].dtype)
    return (model(batch[0]) - groups[batch[1]]).square().sum(1).mean()


class Gan(nn.Module):
    """A generator and a discriminator, each trained by its own optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.discriminator = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2))
        self.generator.rival, self.discriminator.rival = [self.discriminator], [self.generator]  # not submodules


def gan_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of the generator or of the discriminator, each of which knows its rival."""
    noise, labels = batch
    if model[-1].out_features == 2:
        fake, real = model(model.rival[0](noise).detach()), model(noise.flip(1) + 1)
        return functional.cross_entropy(torch.cat([fake, real]), torch.cat([labels * 0, labels * 0 + 1]))
    return functional.cross_entropy(model.rival[0](model(noise)), labels % 2)


def compiled(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: torch.compile(make(), backend="eager")


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return make().to(FLOAT).train()

    return model


def entry(name: str, make: Callable[[], nn.Module], batches: Any, *predictions: int, **options: Any) -> ZooModel:
    return ZooModel(name, seeded(make), batches, predictions, **options)


TRANSFORMERS, PEFT = {"needs": "transformers"}, {"needs": "peft"}
TOKENS, SHIFTED = ROWS * LENGTH, ROWS * (LENGTH - 1)
MODELS: Sequence[ZooModel] = (
    entry("gpt2", gpt2, text, SHIFTED, **TRANSFORMERS),
    entry("llama", llama, text, SHIFTED, **TRANSFORMERS),
    entry("bert", bert, masked_text, 2 * ROWS, **TRANSFORMERS),
    entry("t5", t5, translations, TOKENS, **TRANSFORMERS),
    entry(
        "clip", clip, captions, ROWS, **TRANSFORMERS, outputs=lambda returned: returned.logits_per_image, splits=False
    ),
    entry("vit", vit, named_images, ROWS, **TRANSFORMERS),
    entry("whisper", whisper, recordings, TOKENS, **TRANSFORMERS),
    entry("lora", adapted("lora"), text, SHIFTED, **PEFT, nats=1e-3),
    entry("dora", adapted("dora"), text, SHIFTED, **PEFT, nats=1e-3),
    entry("ia3", adapted("ia3"), text, SHIFTED, **PEFT),
    entry("prompt tuning", adapted("prompt tuning"), text, TOKENS, **PEFT),  # the prompt predicts the first token
    entry("transformer", Translator, next_tokens, SHIFTED),
    entry("transformer encoder", Encoder, next_tokens, SHIFTED),
    entry("gradient checkpointing", lambda: Encoder(checkpointing=True), next_tokens, SHIFTED),
    entry("lstm", lambda: Recurrent(nn.LSTM), next_tokens, SHIFTED, casts=False),
    entry("gru", lambda: Recurrent(nn.GRU), next_tokens, SHIFTED, casts=False),
    entry("resnet", resnet, images, ROWS),
    entry("convnext", convnext, images, ROWS),
    entry("efficientnet", efficientnet, images, ROWS),
    entry("segmentation", segmentation, label_maps, ROWS * SIZE**2),
    entry("gan", Gan, vectors, 2 * ROWS, 4 * ROWS, loss=gan_loss, parts=("generator", "discriminator")),
    entry("tags", mlp, tags, 2 * ROWS, loss=tag_loss),
    entry("regression", mlp, measurements, 2 * ROWS, loss=squared_error),
    entry("embedding", UnitVectors, vectors, 2 * ROWS, loss=distance, outputs=lambda z: z[:, :2]),  # not of norm 1
    entry("shared weights", shared, vectors, 2 * ROWS),
    entry("weight norm", lambda: mlp(wrap=parametrizations.weight_norm), vectors, 2 * ROWS),
    entry("spectral norm", lambda: mlp(wrap=parametrizations.spectral_norm), vectors, 2 * ROWS, splits=False),
    entry("scalar parameter", Tempered, vectors, 2 * ROWS),
    entry("compiled mlp", compiled(mlp), vectors, 2 * ROWS),
    entry("compiled encoder", compiled(Encoder), next_tokens, SHIFTED),
)
