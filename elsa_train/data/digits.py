"""The 1,797 handwritten digits inside scikit-learn, 8x8 pixels from 0 to 16."""

import numpy as np

from elsa_train.data.protocol import ArrayData

TEST_IMAGES = 360


def load_digits() -> ArrayData:
    """Split the digits once and for all: 1,437 to train on, 360 to test."""
    from sklearn import datasets

    found = datasets.load_digits()
    images = found.images.astype(np.uint8)[..., None]
    labels = found.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return ArrayData(
        train=(images[train], labels[train]),
        test=(images[test], labels[test]),
        num_classes=10,
        mean=(4.88,),
        std=(6.02,),
    )
