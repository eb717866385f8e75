"""What is closed at the end of a `with`."""

from typing import Self


class Closing:
    """A context that closes itself."""

    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
