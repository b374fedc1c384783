"""What the benchmarks' commands have in common: a parser that teaches, and words on stderr."""

import argparse
import sys


def parser_of(module_doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the module's docstring, its first line in front."""
    first, _, rest = (module_doc or "").partition("\n")
    return argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
