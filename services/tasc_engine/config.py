"""Shape and bounds of one engine. Values only; what the model is comes from the loader."""

from dataclasses import dataclass

MOST_NODES = 63  # draft tokens of one row in one step; with the root they fill a 64-bit mask


@dataclass(frozen=True)
class EngineConfig:
    """Fixed for an engine's life.

    Attributes:
        rows: b, the most rows decoded together.
        max_model_len: Most tokens of one row, prompt and answer together.
        prefix_cache_bytes: Most keys and values of shared prompt beginnings to keep; 0 for none.
        kv_cache_bytes: Most keys and values to hold; None for as much as all rows need at their
            longest. With less, requests wait in their order until there is room for the first.
            A drafter's are not among them, see `NeuralProposer`.
        max_draft_tokens: Most draft tokens of one row in one step.
        prefill_chunk: Most prompt tokens of one row in one step.
        max_waiting: Most requests that wait for a row.

    Raises:
        ValueError: ``max_draft_tokens`` is more than a step holds.
    """

    rows: int = 8
    max_model_len: int = 1024
    prefill_chunk: int = 256
    max_waiting: int = 1024
    max_draft_tokens: int = 32
    prefix_cache_bytes: int = 1 << 28
    kv_cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.max_draft_tokens > MOST_NODES:
            raise ValueError(f"max_draft_tokens is {self.max_draft_tokens}; most is {MOST_NODES}")
