"""Sizes and limits of one engine. They do not include properties of the model."""

from dataclasses import dataclass

MAX_NODES = 63  # maximum draft tokens of a row in one step: the bits of an int64, without its sign


@dataclass(frozen=True)
class EngineConfig:
    """Settings that are fixed for an engine's lifetime.

    Attributes:
        rows: Maximum number of rows decoded together (the batch size).
        max_model_len: Maximum number of tokens of one row, prompt and answer together.
        prefix_cache_bytes: Maximum bytes of keys and values of shared prompt prefixes; 0 for none.
        kv_cache_bytes: Maximum bytes of keys and values; None for as many as all rows need at their
            maximum length. With fewer bytes, waiting requests are admitted in order, each when it
            fits. Keys and values of a drafter are not included; see `NeuralProposer`.
        gpu_memory_share: Maximum share of the memory of a GPU, or of the process's part of it, that
            weights and caches take together. With less memory than ``rows`` need, waiting requests
            are admitted as with fewer ``kv_cache_bytes``.
        gpu_part: The part of a GPU that the process was given, above 0 and at most 1.
        max_draft_tokens: Maximum number of draft tokens of one row in one step.
        prefill_chunk: Maximum number of prompt tokens of one row in one step.
        max_waiting: Maximum number of requests that wait for a row.

    Raises:
        ValueError: ``max_draft_tokens`` exceeds `MAX_NODES`, or ``gpu_memory_share`` or
            ``gpu_part`` is not above 0 and at most 1.
    """

    rows: int = 8
    max_model_len: int = 1024
    prefill_chunk: int = 256
    max_waiting: int = 1024
    max_draft_tokens: int = 32
    prefix_cache_bytes: int = 1 << 28
    kv_cache_bytes: int | None = None
    gpu_memory_share: float = 0.9
    gpu_part: float = 1.0

    def __post_init__(self) -> None:
        if self.max_draft_tokens > MAX_NODES:
            raise ValueError(
                f"max_draft_tokens is {self.max_draft_tokens}; it may be at most {MAX_NODES}"
            )
        for name in ("gpu_memory_share", "gpu_part"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} is {value}; it must be above 0 and at most 1")
