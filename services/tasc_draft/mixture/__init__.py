"""Drafts from an index: the evidence of each source, its weight, and the choice of paths."""
