"""How runs are trained, and the settings that a stream starts from."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from mooring.lab.model.precision import check_precision

__all__ = ["Training", "default_training"]


@dataclass(frozen=True)
class Training:
    """The settings that all runs of a comparison share; see `RunSpec` for what each is.

    Attributes:
        network: a name, or `package.module:function`.
        lr: the learning rate of methods that are not given their own.
        epochs: passes over each task.
        batch: samples in a batch.
        momentum: of SGD.
        weight_decay: of SGD.
        memory: how many samples replay methods keep; None is their own default.
        heads: "inherit" or "fresh".
        init: a safetensors file that backbones start from.
        dtype: of parameters and arithmetic; "auto" is tf32 on a GPU and float32 elsewhere.
        paper: whether methods without a strength of their own start from the paper's, not from the digits'.
    """

    network: str = "cnn6"
    lr: float = 0.001
    epochs: int = 1
    batch: int = 10
    momentum: float = 0.9
    weight_decay: float = 0.0
    memory: int | None = None
    heads: str = "inherit"
    init: str | None = None
    dtype: str = "auto"
    paper: bool = True

    def spec_fields(self) -> dict[str, Any]:
        """What goes into a spec as it is."""
        told = {name: value for name, value in asdict(self).items() if name not in ("lr", "memory", "init", "paper")}
        return {**told, "dtype": "float32" if self.dtype == "auto" else self.dtype}

    def on(self, device: str) -> "Training":
        """With the dtype that suits a device where none was asked for; one that it has not got is refused.

        Example:
            >>> Training().on("cuda:0").dtype, Training().on("cpu").dtype
            ('tf32', 'float32')
        """
        auto = "tf32" if device.startswith("cuda") else "float32"
        found = replace(self, dtype=auto if self.dtype == "auto" else self.dtype)
        check_precision(found.dtype, device)
        return found


def default_training(stream: str, **given: Any) -> Training:
    """The settings for a stream: the paper's one-epoch protocol, or small ones for the digits; then what is given.

    Example:
        >>> default_training("digits-permuted", epochs=2)
        Training(network='mlp', lr=0.03, epochs=2, batch=20, momentum=0.9, weight_decay=0.0, memory=None, \
heads='inherit', init=None, dtype='auto', paper=False)
    """
    start = (
        Training(network="mlp", lr=0.03, epochs=10, batch=20, paper=False)
        if stream.startswith("digits")
        else Training()
    )
    return replace(start, **{name: value for name, value in given.items() if value is not None})
