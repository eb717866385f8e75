"""Shelves of files, made once."""

import pytest

from kinds import networks
from kinds.shelf import Shelf


@pytest.fixture(scope="session")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """A network with everything that one can have."""
    return Shelf(networks.rich(), tmp_path_factory.mktemp("rich"))


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """A small one, to spoil."""
    return Shelf(networks.plain(), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """Another network like it."""
    return Shelf(networks.plain(1), tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """One of a few bytes."""
    return Shelf(networks.tiny(), tmp_path_factory.mktemp("tiny"))
