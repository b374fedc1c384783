"""Compile most of the code for drafting into numba's cache: ``python -m tasc_draft``.

This takes up to a minute and needs only numpy and numba, so `make` runs it during the installation
of other packages. Code for other sizes and settings is compiled at its first use.
"""

import numpy as np

from tasc_draft.drafts import Tokens
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.replaying import build_learnt_index
from tasc_draft.settings import DraftSettings

_EOS = 8


def main() -> None:
    """Build an index of random tokens and draft from it with each mixture."""
    texts = Tokens.of(np.random.default_rng(0).integers(0, _EOS, (400, 6)).tolist())
    index = build_learnt_index(
        texts,
        texts,
        fingerprint="f",
        vocab_size=_EOS + 1,
        eos_id=_EOS,
        settings=DraftSettings(),
        word_starts=np.ones(_EOS + 2, np.bool_),
        canonical=np.arange(_EOS + 2, dtype=np.int32),
    )
    rows, budget = np.array([0], np.int32), np.array([8], np.int32)
    for mixture in ("mixed", "tasc", "trie"):
        settings = DraftSettings(mixture=mixture, min_prob=0.0)
        proposer = NgramProposer(
            settings, rows=2, capacity=64, vocab_size=_EOS + 1, eos_ids=(_EOS,), index=index
        )
        proposer.start(0, np.array([1, 2, 3], np.int32))
        for _ in range(2):
            proposer.propose(rows, budget)
            proposer.observe(0, np.array([4, 5], np.int32))
        proposer.finish(0)


if __name__ == "__main__":
    main()
