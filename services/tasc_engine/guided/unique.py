"""Finds tokens that would repeat an item of an array with unique items, or extend a full one.

llguidance enforces the schema without ``uniqueItems``. This module also follows an answer's
position in its JSON, byte by byte. In an array with unique items, it allows only items that the
array does not contain yet.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tasc_engine.guided.following import Masks
from tasc_engine.guided.schemas import Node, Prepared, can_be
from tasc_text import TaskTokenizer

_BLANK, _ENDS = b" \t\r\n", b",]} \t\r\n"


class _Frame(NamedTuple):
    """An open array or object.

    Attributes:
        nodes: Schemas that the array or object may follow.
        key: Text of the key whose value is next; None in an array.
        at: Number of items or keys so far.
        left: In an array with unique items, the remaining items, sorted; otherwise None.
    """

    nodes: tuple[Node, ...]
    key: str | None
    at: int = 0
    left: tuple[bytes, ...] | None = None


class Place(NamedTuple):
    """A position in a JSON text.

    Attributes:
        mode: ``v`` before a value, ``s`` in a string, ``e`` after its backslash, ``n`` in a number
            or a name, ``a`` after a value, ``k`` in an object before a key.
        text: The string, number or name so far; empty if its text does not matter, so that the
            cost of a step does not grow with the length of a string.
    """

    frames: tuple[_Frame, ...] = ()
    mode: str = "v"
    text: bytes = b""
    is_key: bool = False


def opening(tokenizer: TaskTokenizer, vocab_size: int) -> Masks:
    """Returns a mask of the tokens that open an array and extend past its first item."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    for i in range(min(tokenizer.vocab_size, vocab_size)):
        bits[i] = b"," in tokenizer.token_bytes(i).partition(b"[")[2]
    return np.packbits(bits, bitorder="little").view(np.uint32)


class Unique:
    """Follows answers of one schema that has arrays with unique items.

    Args:
        several: The mask that `opening` returns.
    """

    def __init__(self, schema: Prepared, tokenizer: TaskTokenizer, several: Masks) -> None:
        self._schema = schema
        self._tokenizer = tokenizer
        self._several = several
        self._root = tuple(schema.expand([schema.root]))

    def after(self, place: Place, token: int) -> Place | None:
        """Returns the position after a token; None if unique items forbid the token."""
        now: Place | None = place
        for byte in self._tokenizer.token_bytes(token):
            if now is None:
                break
            now = self._step(now, byte)
        return now

    def narrow(self, place: Place, mask: Masks) -> None:
        """Removes from ``mask`` the tokens that unique items forbid."""
        inside = place.frames and place.frames[-1].left is not None
        doubtful = mask if inside else mask & self._several
        if not doubtful.any():
            return
        bits = np.unpackbits(doubtful.view(np.uint8), bitorder="little")
        for token in np.flatnonzero(bits).tolist():
            if self.after(place, token) is None:
                mask[token >> 5] &= ~np.uint32(1 << (token & 31))

    def _step(self, place: Place, byte: int) -> Place | None:
        frames, mode, text, is_key = place
        if mode in "se":
            text += bytes([byte]) if text else b""
            if mode == "s" and byte == ord('"'):
                return self._said(frames, text, is_key)
            mode = "e" if mode == "s" and byte == ord("\\") else "s"
            return self._within(Place(frames, mode, text, is_key))
        if mode == "n":
            if byte not in _ENDS:
                text += bytes([byte]) if text else b""
                return self._within(Place(frames, mode, text))
            after = self._said(frames, text, False)
            return after and self._step(after, byte)
        if byte in _BLANK or byte == ord(":"):
            return place
        if byte in b"]}":
            return Place(frames[:-1], "a")
        if byte == ord(","):
            if frames[-1].left == ():
                return None
            top = frames[-1]._replace(at=frames[-1].at + 1)
            return Place((*frames[:-1], top), "v" if top.key is None else "k")
        if byte == ord('"'):
            is_key = mode == "k"
            return Place(frames, "s", b'"' if is_key or _matters(frames) else b"", is_key)
        if byte == ord("{"):
            return Place((*frames, self._opened(frames, "object")), "k")
        if byte == ord("["):
            return Place((*frames, self._opened(frames, "array")), "v")
        return self._within(Place(frames, "n", bytes([byte]) if _matters(frames) else b""))

    def _within(self, place: Place) -> Place | None:
        left = place.frames[-1].left if place.frames else None
        if left is None:
            return place
        at = bisect_left(left, place.text)
        return place if left[at : at + 1] and left[at].startswith(place.text) else None

    def _said(self, frames: tuple[_Frame, ...], text: bytes, is_key: bool) -> Place | None:
        """Returns the position after a string, a number or a name."""
        if not frames:
            return Place(frames, "a")
        top = frames[-1]
        if is_key:
            return Place((*frames[:-1], top._replace(key=json.loads(text))), "v")
        if top.left is not None:
            if text not in top.left:
                return None
            left = tuple(other for other in top.left if other != text)
            top = top._replace(left=left)
        elif top.key is not None and text:
            top = top._replace(nodes=tuple(n for n in top.nodes if _may_say(n, top.key, text)))
        return Place((*frames[:-1], top), "a")

    def _opened(self, frames: tuple[_Frame, ...], kind: str) -> _Frame:
        nodes = tuple(node for node in self._next(frames) if can_be(kind, node))
        if kind == "object":
            return _Frame(nodes, "")
        sets = [self._schema.members.get(id(node)) for node in nodes]
        known = [members for members in sets if members is not None]
        if not known or len(known) < len(sets):
            return _Frame(nodes, None)
        return _Frame(nodes, None, left=tuple(sorted({text for one in known for text in one})))

    def _next(self, frames: tuple[_Frame, ...]) -> Sequence[Node]:
        """Returns the schemas that the next value may follow."""
        if not frames:
            return self._root
        top = frames[-1]
        if top.key is None:
            found = [_item(node, top.at) for node in top.nodes]
        else:
            found = [value for node in top.nodes for value in _property(node, top.key)]
        return self._schema.expand(found)


def _item(node: Node, at: int) -> Any:
    first = node.get("prefixItems", ())
    return first[at] if at < len(first) else node.get("items", {})


def _property(node: Node, key: str) -> list[Any]:
    own, patterns = node.get("properties", {}), node.get("patternProperties", {})
    if key in own:
        return [own[key]]
    return [*patterns.values()] or [node.get("additionalProperties", {})]


def _matters(frames: tuple[_Frame, ...]) -> bool:
    """Whether the text of the next string, number or name decides which values follow."""
    if not frames or frames[-1].key is None:
        return bool(frames) and frames[-1].left is not None
    return any(_named(node, frames[-1].key) is not None for node in frames[-1].nodes)


def _may_say(node: Node, key: str, text: bytes) -> bool:
    """Whether an object's schema allows a value of a property, such as a union's discriminator.

    A schema that does not list the values of the property allows any value.
    """
    named = _named(node, key)
    return named is None or json.loads(text) in named


def _named(node: Node, key: str) -> Sequence[Any] | None:
    """Returns the values that an object's schema lists for a property; None if it lists none."""
    rule = node.get("properties", {}).get(key)
    if not isinstance(rule, dict) or not rule.keys() & {"const", "enum"}:
        return None
    values: Sequence[Any] = [rule["const"]] if "const" in rule else rule["enum"]
    return values
