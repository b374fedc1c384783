"""The targets of one engine, over one KV cache: each row has its own, and they take turns.

Nearly always there is one; while adapters change there are two, until what was begun by the older
has ended. It loads no model and runs no forward.
"""

from collections.abc import Iterable

from tasc_engine.errors import UnknownTarget
from tasc_engine.request import GenerationRequest
from tasc_engine.sequence import Sequence
from tasc_engine.target import Target


class Targets:
    """Targets by number; the first has number 0, and no number is given twice.

    One thread changes them, any may ask.
    """

    def __init__(self, first: Target) -> None:
        self._known = {0: first}
        self._given = 1
        self._last = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """In the order in which they came."""
        return tuple(self._known)

    @property
    def newest(self) -> Target:
        return self._known[max(self._known)]

    def of(self, request: GenerationRequest) -> Target:
        """Who answers a request.

        Raises:
            UnknownTarget: There is no such target, or not any more.
        """
        if (target := self._known.get(request.target)) is None:
            raise UnknownTarget(
                f"request {request.id} is for target {request.target}, which is gone; send it anew"
            )
        return target

    def adapter_number(self, request: GenerationRequest) -> int:
        """Which of its target's adapters a request uses; 0 for none.

        Raises:
            UnknownTarget: See `of`.
            ValueError: The target has no such adapter.
        """
        return self.of(request).adapter_number(request.adapter)

    def add(self, target: Target) -> int:
        """Take another one in; returns its number.

        Raises:
            ValueError: It does not use the cache of those that are there.
        """
        if not target.cache.shares(self.newest.cache):
            raise ValueError("the target has a cache of its own; load it beside the engine's")
        number, self._given = self._given, self._given + 1
        self._known = {**self._known, number: target}
        return number

    def drop(self, number: int) -> None:
        """Let a target go; the last one stays."""
        if len(self._known) > 1:
            self._known = {n: target for n, target in self._known.items() if n != number}

    def turn(self, active: Iterable[Sequence]) -> list[Sequence]:
        """The rows of the next forward: those of one target, of each in turn, by row."""
        rows = sorted(active, key=lambda sequence: sequence.row)
        numbers = sorted({sequence.request.target for sequence in rows})
        if len(numbers) > 1:
            self._last = next((n for n in numbers if n > self._last), numbers[0])
            rows = [sequence for sequence in rows if sequence.request.target == self._last]
        return rows
