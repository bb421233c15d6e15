"""Streams and weights as bytes and plain words, for a process that has no part in this one's memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from safetensors.torch import load, save
from torch import Tensor

from mooring.lab.networks.start import BackboneWeights
from mooring.lab.streams.stream import Split, Stream, Task

__all__ = ["Packed", "packed", "unpacked"]

Names = tuple[str, ...]
"""Of tensors."""


@dataclass(frozen=True)
class Packed:
    """What streams and weights are made of.

    Attributes:
        tensors: every one of them, once.
        streams: by fingerprint: name and heads, then the names of images and labels, then tasks.
        weights: by fingerprint: the path, and each tensor's name.
    """

    tensors: bytes
    streams: dict[str, tuple[str, str, Names, list[tuple[str, str, str, tuple[int, ...]]]]]
    weights: dict[str, tuple[str, dict[str, str]]]


def packed(streams: Mapping[str, Stream], weights: Mapping[str, BackboneWeights]) -> Packed:
    """What is given, by fingerprint, as bytes; memory that several streams share is in it once.

    Example:
        >>> from mooring.lab.streams import by_class, digits
        >>> stream = by_class(digits(), per_task=2)
        >>> told = packed({stream.fingerprint: stream}, {})
        >>> unpacked(told)[0][stream.fingerprint].tasks[1].classes
        (2, 3)
    """
    tensors: dict[str, Tensor] = {}
    known: dict[tuple[object, ...], str] = {}

    def put(tensor: Tensor) -> str:
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        name = known.setdefault(place, str(len(known)))
        if name not in tensors:
            tensors[name] = tensor.detach().cpu().contiguous().clone()
        return name

    made = {}
    for key, stream in streams.items():
        splits = (stream.train, stream.test)
        images = tuple(put(tensor) for split in splits for tensor in (split.images, split.labels))
        tasks = [(task.name, put(task.train), put(task.test), task.classes) for task in stream.tasks]
        made[key] = (stream.name, stream.heads, images, tasks)
    others = {key: (each.path, {n: put(t) for n, t in each.tensors.items()}) for key, each in weights.items()}
    return Packed(save(tensors), made, others)


def unpacked(told: Packed) -> tuple[dict[str, Stream], dict[str, BackboneWeights]]:
    """What `packed` was given; streams share what they shared."""
    tensors = load(told.tensors)
    streams = {}
    for key, (name, heads, images, tasks) in told.streams.items():
        train, test = Split(tensors[images[0]], tensors[images[1]]), Split(tensors[images[2]], tensors[images[3]])
        made = tuple(Task(what, tensors[one], tensors[other], classes) for what, one, other, classes in tasks)
        streams[key] = Stream(name, train, test, made, heads)
        streams[key].__dict__["fingerprint"] = key  # known already, and to read all images again takes its time
    weights = {
        key: BackboneWeights(path, key, {n: tensors[each] for n, each in names.items()})
        for key, (path, names) in told.weights.items()
    }
    return streams, weights
