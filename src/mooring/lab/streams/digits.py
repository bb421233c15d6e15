"""The embedded source: scikit-learn's 1,797 handwritten digits, 8 by 8 pixels."""

import numpy as np
import torch

from mooring.lab.streams.stream import Source, Split

__all__ = ["digits"]


def digits() -> Source:
    """The ten digits: of each class, every fifth image is for testing.

    Example:
        >>> source = digits()
        >>> len(source.train), len(source.test), tuple(source.train.images.shape[1:])
        (1433, 364, (1, 8, 8))
    """
    from sklearn.datasets import load_digits  # slow to import, and not needed by every stream

    data = load_digits()
    images = torch.from_numpy(np.round(data.images * 255 / 16).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    rank = torch.zeros_like(labels)
    for label in range(10):
        mine = labels == label
        rank[mine] = torch.arange(int(mine.sum()))
    held_out = rank % 5 == 0
    splits = [Split(images[chosen], labels[chosen]) for chosen in (~held_out, held_out)]
    return Source("digits", splits[0], splits[1], tuple(str(digit) for digit in range(10)))
