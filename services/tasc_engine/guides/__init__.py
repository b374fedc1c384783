"""What an answer may say next: one of some choices, or what a schema or a grammar allows."""

from tasc_engine.guides.factory import GuideLimits, Guides
from tasc_engine.guides.following import Guided, follow
from tasc_engine.guides.guide import Guide

__all__ = ["Guide", "GuideLimits", "Guided", "Guides", "follow"]
