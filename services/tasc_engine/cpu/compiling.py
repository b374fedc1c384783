"""The compiler of this package. It compiles nothing by itself."""

from pathlib import Path

from tasc_draft.compiled import Compiler

_own = Compiler(Path(__file__).parent)
arithmetic, borrowing = _own.arithmetic, _own.borrowing
