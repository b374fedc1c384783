"""The targets of one engine, over one KV cache: each row has its own, and they take turns.

Nearly always there is one; while adapters change there are two, until what was begun by the older
has ended. It loads no model and runs no forward.
"""

from collections import Counter
from collections.abc import Iterable

from tasc_engine.errors import UnknownTarget
from tasc_engine.model.hidden_states import HiddenStateRequest
from tasc_engine.model.target import Target
from tasc_engine.request import GenerationRequest
from tasc_engine.step.sequence import Sequence

_LEAST_SHARE = 8  # the fewest rows still get every so many-th forward


class Targets:
    """Targets by number; the first has number 0, and no number is given twice.

    One thread changes them, any may ask.
    """

    def __init__(self, first: Target) -> None:
        self._known = {0: first}
        self._given = 1
        self._cold: set[int] = set()
        self._due: dict[int, int] = {}
        self._wants = HiddenStateRequest()

    def watch(self, wants: HiddenStateRequest) -> None:
        """Have every target keep what is wanted of its steps; raises what `Target.watch` does."""
        if wants == self._wants:
            return
        # Those that cannot come first, so that either all are told or none.
        for target in sorted(self._known.values(), key=lambda each: each.decoder is not None):
            target.watch(wants)
        self._wants = wants

    @property
    def numbers(self) -> tuple[int, ...]:
        """In the order in which they came."""
        return tuple(self._known)

    @property
    def newest(self) -> Target:
        known = self._known  # once: another thread may put another in its place
        return known[max(known)]

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
        target.watch(self._wants)
        number, self._given = self._given, self._given + 1
        self._known = {**self._known, number: target}
        self._cold.add(number)
        return number

    def drop(self, number: int) -> None:
        """Let a target go; the last one stays."""
        if len(self._known) > 1:
            self._known = {n: target for n, target in self._known.items() if n != number}

    def warm_up(self) -> None:
        """One part of what was added is made ready; much less than a step where all of it is."""
        for number in tuple(self._cold):
            target = self._known.get(number)
            if target is None or not target.warm_up_one():
                self._cold.discard(number)
            return

    def turn(self, active: Iterable[Sequence]) -> list[Sequence]:
        """The rows of the next forward, by row: those of one target.

        Targets get forwards as they have rows, so that a few rows that are left of one do not take
        half of all; but at least every eighth forward of two.
        """
        rows = sorted(active, key=lambda sequence: sequence.row)
        counts = Counter(sequence.request.target for sequence in rows)
        if len(counts) < 2:
            return rows
        most = max(counts.values())
        shares = {n: max((_LEAST_SHARE - 1) * own, most) for n, own in counts.items()}
        self._due = {n: self._due.get(n, 0) + share for n, share in shares.items()}
        chosen = max(sorted(shares), key=self._due.__getitem__)
        self._due[chosen] -= sum(shares.values())
        return [sequence for sequence in rows if sequence.request.target == chosen]
