"""The Ray Serve application: gateway, replicas, metrics, settings.

`LLM` runs a model with drafts in this process. The class is imported on first access.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tasc_runtime.llm import LLM

__all__ = ["LLM"]

if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name != "LLM":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from tasc_runtime.llm import LLM

        return LLM
