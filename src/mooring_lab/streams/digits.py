"""The data set that needs no download: scikit-learn's 1,797 handwritten digits, 8 by 8 pixels."""

import numpy as np
import torch

from mooring_lab.streams.stream import Source, Split, rank_in_class


def digits() -> Source:
    """Return the ten digits; every fifth image of each class is a test image.

    Example:
        >>> source = digits()
        >>> len(source.train), len(source.test), tuple(source.train.images.shape[1:])
        (1433, 364, (1, 8, 8))
    """
    from sklearn.datasets import load_digits  # slow to import, and other streams do not need it

    data = load_digits()
    images = torch.from_numpy(np.round(data.images * 255 / 16).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    is_test = rank_in_class(labels) % 5 == 0
    train, test = (Split(images[chosen], labels[chosen]) for chosen in (~is_test, is_test))
    return Source("digits", train, test, tuple(str(digit) for digit in range(10)))
