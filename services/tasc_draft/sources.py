"""The names of draft sources, in the order of their numbers in ``Drafts.source``."""

SOURCES = ("corpus", "prompt", "neighbours", "recent", "bigrams", "aligned")
CORPUS, PROMPT, NEIGHBOURS, RECENT, BIGRAMS, ALIGNED = range(len(SOURCES))
