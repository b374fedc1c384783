"""Limits of what an answer may say: one of some choices, or what a schema or a grammar allows."""

from tasc_engine.guided.factory import GuideLimits, Guides
from tasc_engine.guided.following import Guide, Guided, follow

__all__ = ["Guide", "GuideLimits", "Guided", "Guides", "follow"]
