"""Limits answers to given choices, a JSON schema, a regular expression or a grammar."""

from tasc_engine.guided.factory import GuideLimits, Guides
from tasc_engine.guided.following import Guide, Guided, follow
from tasc_engine.guided.scoring import LabelScorer, LabelSet

__all__ = ["Guide", "GuideLimits", "Guided", "Guides", "LabelScorer", "LabelSet", "follow"]
