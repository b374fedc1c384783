"""The names of draft sources, in the order of their numbers in ``Drafts.source``."""

from tasc_draft import cells

SOURCES = ("corpus", "prompt", "neighbours", "recent", "bigrams", "aligned")
CORPUS, PROMPT, NEIGHBOURS, RECENT, BIGRAMS, ALIGNED = range(len(SOURCES))

SOURCE_OF_SLOT = (
    *(CORPUS,) * cells.CONTEXTS,
    *(NEIGHBOURS,) * 2,
    *(PROMPT,) * 2,
    RECENT,
    BIGRAMS,
    *(ALIGNED,) * cells.KINDS,
)
