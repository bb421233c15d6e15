"""The training settings that all runs of a comparison share, and their defaults for a stream."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from mooring_lab.model.precision import check_precision


@dataclass(frozen=True)
class Training:
    """The training settings that all runs of a comparison share; `RunSpec` explains those that are not listed here.

    Attributes:
        lr: the learning rate of methods without a learning rate of their own; with AdamW 0.001 by default, as in torch.
        memory: the number of samples of past tasks that a method keeps; None means the method's default.
        buffers: what becomes of normalization statistics, for methods that moor; the others follow the data.
        init: a safetensors file with the backbone's initial weights.
        dtype: the dtype of parameters and arithmetic; "auto" means tf32 on a GPU and float32 elsewhere.
        paper: take the default strengths from the paper; False takes those tuned on the digits.
    """

    network: str = "cnn6"
    lr: float = 0.001
    epochs: int = 1
    batch: int = 10
    momentum: float = 0.9
    weight_decay: float = 0.0
    memory: int | None = None
    heads: str = "inherit"
    buffers: str = "follow"
    init: str | None = None
    dtype: str = "auto"
    paper: bool = True
    optimizer: str = "sgd"
    schedule: str = "constant"

    def spec_fields(self) -> dict[str, Any]:
        """Return the settings that a `RunSpec` takes unchanged."""
        values = {name: value for name, value in asdict(self).items() if name not in ("lr", "memory", "init", "paper")}
        return {**values, "dtype": "float32" if self.dtype == "auto" else self.dtype}

    def on(self, device: str) -> "Training":
        """Return the settings for a device, with "auto" resolved; raise an error for a dtype that the device lacks.

        Example:
            >>> Training().on("cuda:0").dtype, Training().on("cpu").dtype
            ('tf32', 'float32')
        """
        auto = "tf32" if device.startswith("cuda") else "float32"
        training = replace(self, dtype=auto if self.dtype == "auto" else self.dtype)
        check_precision(training.dtype, device)
        return training


def default_training(stream: str, **overrides: Any) -> Training:
    """Return the paper's one-epoch protocol, or smaller settings for the digits, with overrides that are not None.

    Example:
        >>> default_training("digits-permuted", epochs=2)
        Training(network='mlp', lr=0.03, epochs=2, batch=20, momentum=0.9, weight_decay=0.0, memory=None, \
heads='inherit', buffers='follow', init=None, dtype='auto', paper=False, \
optimizer='sgd', schedule='constant')
    """
    training = Training()
    if stream.startswith("digits"):
        training = Training(network="mlp", lr=0.03, epochs=10, batch=20, paper=False)
    chosen = {name: value for name, value in overrides.items() if value is not None}
    adamw = {"lr": 0.001} if chosen.get("optimizer") == "adamw" else {}
    return replace(training, **adamw | chosen)
