"""Streams: image data sets cut into tasks."""

from mooring.lab.streams.cuts import by_class, permuted, rotated
from mooring.lab.streams.digits import digits
from mooring.lab.streams.stream import Source, Split, Stream, Task

__all__ = ["Source", "Split", "Stream", "Task", "by_class", "digits", "permuted", "rotated"]
