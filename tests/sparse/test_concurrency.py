"""One session in many threads, many sessions, and processes that fork."""

import os
import threading

import numpy as np
import pytest
from sparse_models import close, conv, matmul, needs_library, session, stock_conv

pytestmark = needs_library


def network():
    """A convolution and inputs of several shapes, with what they give."""
    rng = np.random.default_rng(4)
    weight = (rng.standard_normal((16, 8, 3, 3)) * (rng.random((16, 8, 3, 3)) < 0.2)).astype("f4")
    bias = rng.standard_normal(16).astype(np.float32)
    shapes = [(1, 8, 5, 5), (2, 8, 9, 7), (1, 8, 20, 20), (3, 8, 4, 6), (1, 8, 13, 3), (1, 8, 8, 8)]
    inputs = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    expected = [stock_conv(x, weight, bias, [1, 1], [1] * 4) for x in inputs]
    return conv(inputs[0], weight, bias, [1, 1], [1] * 4), inputs, expected


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_a_session(threads):
    """Runs at the same time, of shapes that are new to the session."""
    made, inputs, expected = network()
    running = session(made, sparse=True, threads=threads)
    wrong = []

    def run(first):
        for step in range(30):
            index = (first + step) % len(inputs)
            found = running.run(None, {"x": inputs[index]})[0]
            if not close(found, expected[index], 72):
                wrong.append(index)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_sessions_are_made_at_once():
    """Registering the library and making sessions in several threads."""
    made, inputs, expected = network()
    wrong = []

    def run():
        found = session(made, sparse=True).run(None, {"x": inputs[1]})[0]
        if not close(found, expected[1], 72):
            wrong.append(found)

    workers = [threading.Thread(target=run) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_after_fork():
    """A session of one thread goes on in a child, and a child makes its own."""
    made, inputs, expected = network()
    running = session(made, sparse=True)
    running.run(None, {"x": inputs[0]})
    child = os.fork()
    if not child:
        good = False
        try:
            good = close(running.run(None, {"x": inputs[2]})[0], expected[2], 72)
            own = session(made, sparse=True, threads=2)
            good = good and close(own.run(None, {"x": inputs[1]})[0], expected[1], 72)
        finally:
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert close(running.run(None, {"x": inputs[2]})[0], expected[2], 72)


def test_more_threads_than_work():
    """A layer of one output."""
    x = np.ones((1, 4), np.float32)
    made = matmul(x, np.ones((1, 4), np.float32), np.ones(1, np.float32))
    assert session(made, sparse=True, threads=4).run(None, {"x": x})[0].item() == 5
