"""Makes the proposers of one engine, by the settings of service, index and task.

It opens no index and decides nothing about answers.
"""

import dataclasses
from collections.abc import Sequence

from tasc_draft import DraftIndex, DraftSettings, NgramProposer
from tasc_engine import EngineConfig
from tasc_serve.settings import DraftOverrides
from tasc_store import TaskRecord


class Proposers:
    """Proposers for the rows of one engine; any thread may ask.

    Args:
        overrides: The service's own settings, which are over all others.
    """

    def __init__(
        self,
        overrides: DraftOverrides | None,
        config: EngineConfig,
        vocab_size: int,
        eos_ids: Sequence[int],
    ) -> None:
        self._overrides = overrides.model_dump(exclude_none=True) if overrides else {}
        self._config, self._vocab_size, self._eos_ids = config, vocab_size, eos_ids

    def settings(self, record: TaskRecord, index: DraftIndex) -> DraftSettings:
        """The service's own settings over those tuned with the index, or over the record's."""
        return dataclasses.replace(index.settings or record.draft, **self._overrides)

    def make(self, record: TaskRecord, index: DraftIndex) -> NgramProposer:
        """A proposer without rows; takes its memory, and compiles what is new, here.

        Raises:
            ValueError: These settings cannot draft from this index.
        """
        settings = self.settings(record, index)
        of_row = settings.num_speculative_tokens
        if of_row and record.neural:  # a drafter beside fills its trees, in all rows at once
            of_row = max(of_row, record.neural.nodes)
        return NgramProposer(
            settings,
            rows=self._config.rows,
            capacity=self._config.max_model_len,
            vocab_size=self._vocab_size,
            eos_ids=self._eos_ids,
            index=index,
            nodes=self._config.rows * of_row,
        )
