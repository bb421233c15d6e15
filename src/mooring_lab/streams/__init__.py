"""Streams: image data sets cut into tasks."""

from mooring_lab.streams.cuts import by_class, permuted, rotated
from mooring_lab.streams.digits import digits
from mooring_lab.streams.stream import Source, Split, Stream, Task

__all__ = ["Source", "Split", "Stream", "Task", "by_class", "digits", "permuted", "rotated"]
