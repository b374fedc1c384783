"""Drafts of a step: a proposer that may fail, and what it learns from the target."""
