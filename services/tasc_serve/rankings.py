"""Ranked vocabularies out of the store. It counts no tokens and drafts nothing."""

import tempfile
from pathlib import Path

from tasc_engine.neural.ranking import Ranking
from tasc_store import ArtifactStore


def current_ranking(store: ArtifactStore) -> Ranking | None:
    """The announced ranking of a store of kind VOCABULARY; None where there is none.

    Raises:
        RankingError: It is damaged, or another tokenizer's.
        StoreError: Redis fails.
    """
    artifact = store.current()
    if artifact is None:
        return None
    with tempfile.TemporaryDirectory(prefix="tasc-vocabulary-") as folder:
        path = Path(folder) / "vocabulary.npz"
        store.download(artifact, path)
        return Ranking.load(path, store.fingerprint)
