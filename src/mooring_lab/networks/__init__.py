"""Networks: a backbone, by name or from the user's own module, with one head per task or one for all."""

import importlib
import re
from collections.abc import Callable

from torch import nn

from mooring.errors import MooringError, first_line, unknown
from mooring_lab.model.source_stamp import source_stamp
from mooring_lab.networks.backbones import CNN6, ResNet18Third, mlp
from mooring_lab.networks.multi_head import MultiHeadNetwork
from mooring_lab.streams.stream import Stream

__all__ = ["BACKBONES", "MultiHeadNetwork", "backbone_factory", "build_network", "versioned_name"]

Shape = tuple[int, int, int]

BACKBONES: dict[str, Callable[[Shape], nn.Module]] = {
    "mlp": mlp,
    "cnn6": lambda shape: CNN6(shape[0]),
    "resnet18-third": lambda shape: ResNet18Third(shape[0]),
    "resnet18-quarter": lambda shape: ResNet18Third(shape[0], part=4),
}


def backbone_factory(name: str) -> Callable[[Shape], nn.Module]:
    """Return the function that makes a backbone from an image shape (channels, height, width).

    The name is a key of `BACKBONES`, or `package.module:function` for a function of your own.

    Example:
        >>> backbone_factory("cnn6")((3, 32, 32)).__class__.__name__
        'CNN6'
    """
    if not isinstance(name, str):
        raise MooringError(f"network={name!r} is not allowed: give a name, or package.module:function")
    if ":" not in name:
        if name not in BACKBONES:
            raise unknown("network", name, [*BACKBONES, "package.module:function"])
        return BACKBONES[name]
    module, _, function = name.partition("@")[0].partition(":")
    try:
        factory: Callable[[Shape], nn.Module] = getattr(importlib.import_module(module.removesuffix(".py")), function)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise MooringError(f"network {name!r} cannot be imported: {first_line(error)}") from error
    if not callable(factory):
        raise MooringError(f"network {name!r} is not a function from (channels, height, width) to a module")
    return factory


def build_network(name: str, stream: Stream) -> MultiHeadNetwork:
    """Return the network of that name for a stream, with its image shape, its classes and its number of heads.

    Example:
        >>> from mooring_lab.streams import by_class, digits
        >>> len(build_network("mlp", by_class(digits(), per_task=2)).heads)
        5
    """
    try:
        backbone = backbone_factory(name)(stream.shape)
    except (TypeError, ValueError) as error:
        if isinstance(error, MooringError):
            raise
        call = "is called with one argument, the tuple (channels, height, width)"
        raise MooringError(f"network {name!r} {call}: {first_line(error)}") from error
    if not isinstance(backbone, nn.Module):
        raise MooringError(f"network {name!r} returned a {type(backbone).__name__}, not a torch.nn.Module")
    try:
        return MultiHeadNetwork(backbone, stream.outputs, stream.head_count, stream.shape)
    except RuntimeError as error:
        reason = first_line(error)
        raise MooringError(f"network {name!r} fails on an image of shape {stream.shape}: {reason}") from error


def versioned_name(name: str, network: MultiHeadNetwork) -> str:
    """Return the name; a network of your own gets a hash, so that one that was changed is another network.

    The hash covers the source of the named module, of the local modules that it imports, and the structure of the
    backbone that was built, which may depend on anything else.

    Args:
        name: a key of `BACKBONES`, or `package.module:function`.
        network: what was built under that name.

    Example:
        >>> versioned_name("cnn6", MultiHeadNetwork(CNN6(), outputs=2, heads=1, shape=(3, 32, 32)))
        'cnn6'
    """
    if ":" not in name or "@" in name:
        return name
    module = name.partition(":")[0].removesuffix(".py")
    return f"{name}@{source_stamp(module, _structure(network.backbone))}"


def _structure(backbone: nn.Module) -> str:
    """Return the layers with their options, and the shape and dtype of every tensor."""
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(backbone))
    tensors = [(key, tuple(tensor.shape), str(tensor.dtype)) for key, tensor in backbone.state_dict().items()]
    return repr((layers, tensors, [name for name, p in backbone.named_parameters() if p.requires_grad]))
