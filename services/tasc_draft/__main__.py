"""Compile what drafting needs into the cache, so that no first run does: ``python -m tasc_draft``.

It takes half a minute and needs numpy and numba alone, so `make` runs it beside the installation.
"""

from typing import Any

import numpy as np

from tasc_draft.learning import build_learnt_index
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.settings import DraftSettings
from tasc_draft.tokens import Tokens

EOS = 8
facts: dict[str, Any] = {
    "fingerprint": "f",
    "vocab_size": EOS + 1,
    "word_starts": np.ones(EOS + 2, np.bool_),
    "canonical": np.arange(EOS + 2, dtype=np.int32),
}
texts = Tokens.of(np.random.default_rng(0).integers(0, EOS, (400, 6)).tolist())
rows, budget = np.array([0], np.int32), np.array([8], np.int32)
for mixture in ("mixed", "tasc", "trie"):
    settings = DraftSettings(mixture=mixture, min_prob=0.0)
    index = build_learnt_index(texts, texts, eos_id=EOS, settings=settings, **facts)
    proposer = NgramProposer(
        settings, rows=2, capacity=64, vocab_size=EOS + 1, eos_ids=(EOS,), index=index
    )
    proposer.start(0, np.array([1, 2, 3], np.int32))
    for _ in range(2):
        proposer.propose(rows, budget)
        proposer.observe(0, np.array([4, 5], np.int32))
    proposer.finish(0)
