"""Data that breaks off in the process that makes its batches."""

import os
import signal

import numpy as np


class Odd:
    """An error at index 60, and the end of the process at 50."""

    num_classes, mean, std = 2, (0.0,), (1.0,)

    def size(self, split):
        return 100

    def shape(self):
        return 2, 2, 1

    def batch(self, split, indices, seed):
        if 50 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        if 60 in indices:
            raise ValueError("sixty")
        return np.zeros((len(indices), 2, 2, 1), np.float32), (indices % 2).astype(np.int32)
