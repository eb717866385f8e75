"""What is closed at the end of a `with`."""

from types import TracebackType
from typing import Self


class Closing:
    """A context that closes itself."""

    def close(self) -> None:
        """Give back what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
