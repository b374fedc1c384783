"""Rewrites JSON schemas for llguidance, and finds their arrays with unique items.

llguidance refuses ``uniqueItems``, ``propertyNames`` and some formats. Pydantic writes them all.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias
from urllib.parse import unquote

from tasc_engine.errors import GuideError

Node: TypeAlias = dict[str, Any]
LENIENT = 'or ignore what cannot be enforced: "x-guidance": {"lenient": true}'
MAX_MEMBERS = 1000  # maximum number of values that a unique item may have
MAX_VISITS = 100_000  # maximum schemas visited in the search for arrays with unique items

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONES = ("items", "additionalProperties", "additionalItems")
_UNIONS = ("anyOf", "oneOf")
_LIMITS = {"pattern", "format", "minLength", "maxLength", "exclusiveMinimum", "exclusiveMaximum"}
_LIMITS |= {"multipleOf", "allOf", "not", "if"}
_HEX = "[0-9a-fA-F]"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_NETWORK = rf"{_BYTE}(\.{_BYTE}){{3}}/(3[0-2]|[12]?[0-9])"
# Replacements of formats that llguidance does not know; an empty schema allows any text.
_FORMATS: Mapping[str, Node] = {
    **{name: {} for name in ("password", "binary", "path", "file-path", "directory-path")},
    **{
        f"uuid{n}": {"pattern": f"^{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}"
                                f"-{_HEX}{{12}}$"}
        for n in range(1, 9)
    },
    "base64": {"pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"},
    "base64url": {"pattern": "^([A-Za-z0-9_-]{4})*([A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$"},
    "ipvanyaddress": {"anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
    **{name: {"pattern": f"^{_NETWORK}$"} for name in ("ipv4network", "ipv4interface")},
}  # fmt: skip
_DECIMAL = "^(?!^[-+.]*$)"  # Pydantic's pattern for a decimal that has a digit


@dataclass(frozen=True)
class Prepared:
    """A schema for llguidance, and the unique items that llguidance does not enforce.

    Attributes:
        members: For each array with unique items, the sorted JSON texts that its items may have.
            The key is the ``id`` of the array's node in ``root``.
    """

    root: Node
    members: dict[int, tuple[bytes, ...]] = field(default_factory=dict)

    def expand(self, nodes: Sequence[Any]) -> list[Node]:
        """Returns the schemas and all schemas that their references, unions and allOf lead to."""
        found: dict[int, Node] = {}
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if not isinstance(node, dict) or id(node) in found:
                continue
            found[id(node)] = node
            if "$ref" in node:
                pending.append(_target(self.root, node["$ref"]))
            for name in (*_UNIONS, "allOf"):
                pending += node.get(name) or ()
        return list(found.values())


def prepared(schema: Node) -> Prepared:
    """Rewrites the parts of a schema that llguidance does not support.

    Raises:
        GuideError: ``uniqueItems`` cannot be enforced, and the schema is not lenient.
    """
    own = schema.get("x-guidance")
    lenient = isinstance(own, dict) and own.get("lenient") is True
    unique: list[Node] = []
    made = Prepared(_rewritten(schema, unique, schema))
    for node in unique:
        try:
            if members := _members_of(made, node):
                made.members[id(node)] = members
        except GuideError:
            if not lenient:
                raise
    if made.members and not lenient:
        _require_certain(made)
    return made


def _rewritten(schema: Any, unique: list[Node], root: Node) -> Any:
    """Returns a schema that llguidance supports; appends arrays with unique items to ``unique``."""
    if not isinstance(schema, dict):
        return schema
    node = dict(schema)
    for name in _MAPS:
        if isinstance(node.get(name), dict):
            node[name] = {key: _rewritten(value, unique, root) for key, value in node[name].items()}
    for name in _LISTS:
        if isinstance(node.get(name), list):
            node[name] = [_rewritten(value, unique, root) for value in node[name]]
    for name in _ONES:
        if name in node:
            node[name] = _rewritten(node[name], unique, root)
    if isinstance(names := node.get("propertyNames"), dict):
        _name_properties(node, names, root)
    if isinstance(text := node.get("format"), str) and text in _FORMATS:
        del node["format"]
        _add(node, _FORMATS[text])
    if isinstance(text := node.get("pattern"), str) and text.startswith(_DECIMAL):
        node["pattern"] = "^" + text.removeprefix(_DECIMAL)
        _add(node, {"pattern": "[0-9]"})
    if isinstance(node.get("uniqueItems"), bool) and node.pop("uniqueItems"):
        unique.append(node)
    return node


def _name_properties(node: Node, names: Node, root: Node) -> None:
    """Lists the properties of an object whose names are an enum, as in ``dict[Enum, int]``."""
    if not names.keys() - {"type", "title", "description"}:
        del node["propertyNames"]  # any name is a string
        return
    known = _values(Prepared(root), names, {})
    value = node.get("additionalProperties", {})
    if known is None or not all(isinstance(name, str) for name in known):
        return
    if "patternProperties" not in node:
        own = node.get("properties", {})
        node["properties"] = {name: own.get(name, value) for name in known}
        node["additionalProperties"] = False
        del node["propertyNames"]


def _add(node: Node, rule: Node) -> None:
    if rule:
        node["allOf"] = [*node.get("allOf", ()), rule]


def _members_of(made: Prepared, node: Node) -> tuple[bytes, ...]:
    """Returns the texts that items may have; empty if the array cannot have a second item.

    Raises:
        GuideError: There are too many texts.
    """
    if node.get("maxItems") in (0, 1):
        return ()
    values = None if "prefixItems" in node else _values(made, node.get("items"), {})
    if values is None:
        raise GuideError(
            "no answer can be guided by this json_schema: uniqueItems is enforced only for items "
            f"of an enum, const, boolean or small integer range, of at most {MAX_MEMBERS} values; "
            f"give the items an enum, leave uniqueItems out, {LENIENT}"
        )
    members = {json.dumps(value, ensure_ascii=False).encode() for value in values}
    if len(members) < node.get("minItems", 0):
        raise GuideError(
            f"no answer can be guided by this json_schema: minItems is {node['minItems']}, but "
            f"uniqueItems allows only {len(members)} different items; lower minItems"
        )
    return tuple(sorted(members))


def _values(made: Prepared, node: Any, known: dict[int, list[Any] | None]) -> list[Any] | None:
    """Returns the scalars that a schema allows; None if there are too many or they are unknown.

    Args:
        known: The results for the schemas visited so far, by the schema's ``id``.
    """
    if id(node) not in known:
        known[id(node)] = None  # the result if the schema refers to itself
        found = _found(made, node, known)
        known[id(node)] = found if found is not None and len(found) <= MAX_MEMBERS else None
    return known[id(node)]


def _found(made: Prepared, node: Any, known: dict[int, list[Any] | None]) -> list[Any] | None:
    if not isinstance(node, dict) or node.keys() & _LIMITS:
        return None
    kinds = node.get("type", list(_KINDS))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    low, high = node.get("minimum", -math.inf), node.get("maximum", math.inf)
    if not (isinstance(low, int | float) and isinstance(high, int | float)):
        return None
    lists = [node["enum"]] if "enum" in node else []
    if "const" in node:
        lists.append([node["const"]])
    if "$ref" in node:
        lists.append(_values(made, _target(made.root, node["$ref"]), known))
    for name in _UNIONS:
        if name in node:
            parts = [_values(made, option, known) for option in node[name]]
            lists.append(None if None in parts else [*chain(*filter(None, parts))])
    if not lists:
        lists.append(_of_kind(kinds, low, high))
    if None in lists or not all(type(v) in _SCALARS for v in chain(*lists)):
        return None
    common = set.intersection(*({(type(v), v) for v in values} for values in lists))
    return [
        v
        for v in lists[0]
        if (type(v), v) in common
        and any(type(v) in _KINDS.get(kind, ()) for kind in kinds)
        and (type(v) is not int or low <= v <= high)
    ]


def _of_kind(kinds: Sequence[str], low: float, high: float) -> list[Any] | None:
    """Returns all values of a type; None if there are too many values, or several types."""
    if len(kinds) != 1:
        return None
    if kinds[0] == "integer" and -math.inf < low and high < math.inf:
        few = high < low + MAX_MEMBERS  # not a difference: an integer may be too large for a float
        return list(range(math.ceil(low), math.floor(high) + 1)) if few else None
    single: Mapping[str, list[Any]] = {"boolean": [False, True], "null": [None]}
    return single.get(kinds[0])


_KINDS = {"string": (str,), "integer": (int,), "number": (int,), "boolean": (bool,),
          "null": (type(None),)}  # fmt: skip
_SCALARS = {kind for kinds in _KINDS.values() for kind in kinds}


def _require_certain(made: Prepared) -> None:
    """Raises GuideError if the alternatives for an array differ in their unique items."""
    visits = 0
    for node in _nodes(made.root):
        reference = node.get("$ref", "#")
        if _target(made.root, reference) is None:
            raise GuideError(
                f"this json_schema has uniqueItems and the $ref {reference!r}, which are not "
                f"supported together; use a $ref that points into #/$defs, {LENIENT}"
            )
        groups: list[list[Any]] = [[node]]
        if patterns := node.get("patternProperties"):  # a name may match any of them
            own = node.get("properties", {})
            groups.append([*patterns.values(), *own.values(), node.get("additionalProperties")])
        reached = [made.expand(group) for group in groups]
        visits += sum(len(group) for group in reached)
        if visits > MAX_VISITS:
            raise GuideError(
                "this json_schema has uniqueItems and too many references and unions; "
                f"use fewer of them, {LENIENT}"
            )
        arrays = [[other for other in group if can_be("array", other)] for group in reached]
        if any(len({made.members.get(id(other)) for other in group}) > 1 for group in arrays):
            raise GuideError(
                "in this json_schema, uniqueItems is supported only if every array alternative in "
                "anyOf, oneOf, allOf or patternProperties has it with the same values; make the "
                "alternatives equal, "
                f"{LENIENT}"
            )


def can_be(kind: str, node: Node) -> bool:
    """Whether a schema allows values of a type by itself, without the schemas it refers to."""
    types = node.get("type")
    if types is None:
        return not node.keys() & {"$ref", "enum", "const", *_UNIONS, "allOf"}
    return bool(kind == types or (isinstance(types, list) and kind in types))


def _nodes(schema: Any) -> Iterator[Node]:
    if not isinstance(schema, dict):
        return
    yield schema
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            for value in schema[name].values():
                yield from _nodes(value)
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            for value in schema[name]:
                yield from _nodes(value)
    for name in _ONES:
        yield from _nodes(schema.get(name))


def _target(root: Node, reference: Any) -> Any:
    """Returns the value that a JSON pointer refers to; None if no value exists there."""
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return None
    node: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or name not in node:
            return None
        node = node[name]
    return node
