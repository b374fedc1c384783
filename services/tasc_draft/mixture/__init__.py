"""Drafts from an index: what each source says, what it is worth, and which paths to follow."""
