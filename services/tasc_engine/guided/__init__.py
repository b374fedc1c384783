"""Limits answers to choices, a JSON schema, a regular expression or a grammar; scores labels."""

from typing import TypeAlias

from tasc_engine.guided.factory import GuideLimits, Guides
from tasc_engine.guided.following import Guide, Guided, follow
from tasc_engine.guided.scoring import LabelScorer, LabelSet

Guidance: TypeAlias = Guide | LabelSet
"""A compiled guide, or compiled labels."""

__all__ = [
    "Guidance",
    "Guide",
    "GuideLimits",
    "Guided",
    "Guides",
    "LabelScorer",
    "LabelSet",
    "follow",
]
