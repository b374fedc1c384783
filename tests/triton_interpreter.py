"""Halves the time of Triton's interpreter, which runs a GPU's kernels in tests on a CPU."""

from collections.abc import Callable
from typing import Any

from triton.runtime.interpreter import GridExecutor, InterpretedFunction


def patch_once_in_a_launch() -> None:
    """Prepare `triton.language` once for each function of a launch, not for each of its calls.

    The interpreter replaces a hundred functions of `triton.language` by its own before each call of
    a function, also where it has replaced them. That takes more time than the calls.
    """
    patched = set[Callable[..., Any]]()
    launch, call = GridExecutor.__call__, InterpretedFunction.__call__

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()  # a launch restores the functions at its end
        return launch(self, *args, **kwargs)

    def call_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn in patched:
            return self.rewrite()(*args, **kwargs)
        patched.add(self.fn)
        return call(self, *args, **kwargs)

    GridExecutor.__call__ = launch_anew
    InterpretedFunction.__call__ = call_patched
