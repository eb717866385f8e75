"""Every operation on every kind of network, from every place: one abstract suite.

A kind (`files`) is how a network is held, a place (`places`) how its bytes are reached, an
operation (`operations`) a way to read a level, and a fault (`faults`) what can be wrong. Each is
one class or function; the tests combine them. A new one is held to what the others promise.
"""

import pytest

pytest.register_assert_rewrite("kinds.operations")
