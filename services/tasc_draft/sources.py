"""The names of draft sources, in the order of their numbers in ``Drafts.source``."""

SOURCES = ("corpus", "prompt")
CORPUS, PROMPT = range(len(SOURCES))
