"""Whether the base's weights lie on this device as a whole, or are gathered from several ranks when they are used."""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Presence(Protocol):
    """Where the weights of a base are. Whoever reads a weight without calling its module asks for it first."""

    @property
    def shared(self) -> bool:
        """Whether several ranks hold a part each: then every use takes all of them."""
        ...

    @property
    def passing_bytes(self) -> int:
        """Bytes that are there by turns, beside those that this rank always holds."""
        ...

    def held_bytes(self, whole: int) -> int:
        """Bytes of weights on this device at most at a time, of a base that has ``whole``."""
        ...

    def layer(self, place: int) -> None:
        """Have the weights of one decoder layer here, until another one is asked for."""
        ...

    def ends(self) -> None:
        """Have everything here that is not in a decoder layer: embedding and output layer."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """For work of one process only, that the others do not hear of."""
        ...


class Whole:
    """All weights lie on this device."""

    shared = False
    passing_bytes = 0

    def held_bytes(self, whole: int) -> int:
        return whole

    def layer(self, place: int) -> None: ...

    def ends(self) -> None: ...

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()
