"""Settings of one engine in settings files and commands."""

from typing import Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tasc_draft import DraftSettings


def fault_of(error: ValidationError) -> str:
    """Describes the first error in one line, with its value."""
    fault = error.errors(include_url=False)[0]
    name = ".".join(map(str, fault["loc"])) or "it"
    if fault["type"] == "missing":
        return f"{name} is missing"
    return f"{name} is {fault['input']!r:.80}: {fault['msg']}"


class Section(BaseModel):
    """A part of a settings file; unknown fields are refused, and values are frozen."""

    # Values can be secrets, so errors do not contain them.
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


Backend: TypeAlias = Literal["tasc", "vllm"]


class EngineSettings(Section):
    """The engine of a replica: batch size, context, caches, drafts, threads."""

    rows: int = Field(8, ge=1, le=4096, description="b, the number of rows decoded together.")
    max_model_len: int | None = Field(
        None,
        ge=8,
        description="Maximum tokens of prompt and answer of one row; unset: what the model "
        "supports, up to 1024.",
    )
    prefill_chunk: int = Field(
        256, ge=1, description="Maximum prompt tokens of one row in one step."
    )
    kv_cache_bytes: int | None = Field(
        None,
        ge=1,
        description="Maximum size of the model's KV cache; a drafter's cache is extra. Unset: "
        "the size that all rows need at most, or with backend vllm on a GPU what gpu_memory_share "
        "leaves. On a GPU, gpu_memory_share limits it too.",
    )
    gpu_memory_share: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Maximum share of a GPU's memory, or of the part that num_gpus below 1 "
        "reserves, for weights and caches together; the rest is for CUDA graphs, working memory "
        "and a drafter. With less memory than all rows need, requests may wait. Backend vllm "
        "ignores it if kv_cache_bytes is set.",
    )
    max_draft_tokens: int = Field(
        32,
        ge=0,
        le=63,
        description="Maximum draft tokens of one row in one step, whatever a task asks for.",
    )
    prefix_cache_bytes: int = Field(
        1 << 28,
        ge=0,
        description="Maximum size of the cache of prompt beginnings that requests share.",
    )
    cost_aware: bool = Field(
        True,
        description="Measure step costs at the first start and draft only where drafting pays; "
        "false: always draft. Backend vllm learns from its own steps where drafts pay.",
    )
    cost_seconds: float = Field(
        15.0,
        gt=0,
        description="Maximum time to measure step costs at the first start; on a GPU at most 3 s. "
        "Backend vllm measures none.",
    )
    neural_draft_limit_s: float = Field(
        0.5, gt=0, description="A drafter whose median step takes longer is switched off."
    )
    torch_threads: int = Field(1, ge=1, description="CPU threads for the linear layers.")
    device: str = Field(
        "auto",
        description="auto, cpu, cuda, cuda:0 and so on; auto uses a GPU if there is one. Backend "
        "vllm takes auto alone: the build of vLLM decides.",
    )
    backend: Backend = Field(
        "tasc",
        description="tasc: this project's engine. vllm: vLLM, which must be installed in the "
        "environment of the engine, with this project's drafts.",
    )
    vllm: dict[str, Any] = Field(
        {},
        description="Backend vllm: further fields of vLLM's EngineArgs, such as "
        "tensor_parallel_size, quantization or enforce_eager.",
    )
    python: str | None = Field(
        None,
        description="Python interpreter of another environment, in which Ray starts the processes "
        "of engines, with the same versions of Python and Ray; unset: the service's own.",
    )

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Ray's ``runtime_env`` of processes with this engine."""
        return {"py_executable": self.python} if self.python else {}

    @model_validator(mode="after")
    def _has_one_backend(self) -> Self:
        if self.vllm and self.backend != "vllm":
            raise ValueError(
                f"vllm has {', '.join(self.vllm)}, but backend is {self.backend}; set backend to "
                "vllm, or leave vllm out"
            )
        return self


class EngineOverrides(EngineSettings):
    """Settings of one task's engines; those that are set replace the service's."""

    @model_validator(mode="after")
    def _has_one_backend(self) -> Self:
        return self  # the backend may be the service's; `over` checks both together

    def over(self, settings: EngineSettings) -> EngineSettings:
        """Returns the settings of the task's engines.

        Another backend than the service's leaves the service's arguments of vLLM out.

        Args:
            settings: The settings of the service.

        Raises:
            ValidationError: They do not go together.
        """
        own = {name: getattr(self, name) for name in self.model_fields_set}
        merged = settings.model_dump() | own
        if merged["backend"] != settings.backend:
            merged["vllm"] = self.vllm
        return EngineSettings(**merged)


class DraftOverrides(Section):
    """Drafting settings; values that are set replace the values of the task's record."""

    mixture: str | None = Field(
        None, description="How sources are mixed: mixed (learnt weights), tasc or trie."
    )
    num_speculative_tokens: int | None = Field(
        None,
        description="Maximum draft tokens of one row; 0 switches drafting off. "
        "engine.max_draft_tokens limits it.",
    )
    min_prob: float | None = Field(
        None, description="A draft ends where the probability of its path falls below this value."
    )
    n_max: int | None = Field(None, description="tasc: length of the longest n-gram.")
    corpus_weight: float | None = Field(
        None, description="tasc: weight of the corpus against the text of the row."
    )
    neighbours: int | None = Field(
        None, description="mixed: number of training rows with similar prompts to draft from."
    )
    recent_tokens: int | None = Field(
        None, description="mixed: space for answers given since the index was built; 0: none."
    )
    learning_rate: float | None = Field(
        None, description="mixed: how fast the weights adapt to the model's answers; 0: not at all."
    )

    @model_validator(mode="after")
    def _within_range(self) -> Self:
        DraftSettings(**self.model_dump(exclude_none=True))
        return self
