"""The names of draft sources, in the order of their numbers in ``Drafts.source``."""

NGRAM_SOURCES = ("corpus", "prompt", "neighbours", "recent", "bigrams", "aligned")
SOURCES = (*NGRAM_SOURCES, "neural")
CORPUS, PROMPT, NEIGHBOURS, RECENT, BIGRAMS, ALIGNED, NEURAL = range(len(SOURCES))
