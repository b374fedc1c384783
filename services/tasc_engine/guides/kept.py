"""What was made for guides, the latest used of it. It knows neither guides nor what is made."""

from collections import OrderedDict
from typing import Generic, TypeVar

from tasc_engine.request import GuideSpec

Made = TypeVar("Made")


class Kept(Generic[Made]):
    """What belongs to guides, up to so many and so many characters of them together.

    The newest is kept whatever its size. Not for several threads at a time.
    """

    def __init__(self, most: int, characters: int) -> None:
        self._most, self._most_characters = most, characters
        self._made: OrderedDict[GuideSpec, Made] = OrderedDict()
        self._characters = 0

    def __contains__(self, spec: GuideSpec) -> bool:
        return spec in self._made

    def get(self, spec: GuideSpec) -> Made | None:
        found = self._made.get(spec)
        if found is not None:
            self._made.move_to_end(spec)
        return found

    def add(self, spec: GuideSpec, made: Made) -> None:
        """Keep one that is not kept yet."""
        self._made[spec] = made
        self._characters += spec.characters
        while len(self._made) > 1 and (
            len(self._made) > self._most or self._characters > self._most_characters
        ):
            oldest, _ = self._made.popitem(last=False)
            self._characters -= oldest.characters
