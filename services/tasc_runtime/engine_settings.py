"""Settings of one engine, as settings files and commands give them."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tasc_draft import DraftSettings


class Section(BaseModel):
    """A part of a settings file: its fields are known, and fixed once read."""

    # Values can be secrets: what is wrong is said without them.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class EngineSettings(Section):
    """One engine: rows decoded together, context, prefill, threads."""

    rows: int = Field(8, ge=1, le=256, description="b, rows decoded together")
    max_model_len: int | None = Field(
        None, ge=8, description="prompt + answer of one row, tokens; unset: up to 1024"
    )
    prefill_chunk: int = Field(256, ge=1, description="prompt tokens of one row in one step")
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="the target's keys and values in memory, a drafter's come on top; unset: what "
        "all rows need at most",
    )
    max_draft_tokens: int = Field(
        32, ge=0, le=63, description="draft tokens of one row in one step"
    )
    prefix_cache_bytes: int = Field(
        1 << 28, ge=0, description="keys and values kept of beginnings that prompts share"
    )
    cost_aware: bool = Field(
        True, description="measure step costs at the first start; draft only where it pays"
    )
    cost_seconds: float = Field(
        15.0, gt=0, description="most time that measuring step costs takes at the first start"
    )
    neural_draft_limit_s: float = Field(
        0.5, gt=0, description="a drafter whose steps take longer is switched off"
    )
    torch_threads: int = Field(1, ge=1, description="CPU threads of a replica's linear layers")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:0 ...")


class DraftOverrides(Section):
    """Drafting settings that replace the task record's; unset ones stay the task's own."""

    mixture: str | None = None
    num_speculative_tokens: int | None = None
    min_prob: float | None = None
    n_max: int | None = None
    corpus_weight: float | None = None
    neighbours: int | None = None
    recent_tokens: int | None = None
    learning_rate: float | None = None

    @model_validator(mode="after")
    def _within_range(self) -> Self:
        DraftSettings(**self.model_dump(exclude_none=True))
        return self
