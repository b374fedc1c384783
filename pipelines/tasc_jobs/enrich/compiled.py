"""This package's compiled functions; see `tasc_draft.compiled`."""

from pathlib import Path

from tasc_draft.compiled import Compiler

compiled = Compiler(Path(__file__).parent).compiled
