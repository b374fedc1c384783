"""Whether a folder holds a fine-tuned model already; told before anything heavy is imported."""

from pathlib import Path

from tasc_jobs.finetune.claim import Kind
from tasc_jobs.finetune.errors import FinetuneError

REPORT = "finetune.json"  # put in its place last, when all is there
FINETUNE = Kind("a fine-tune", ("adapter", "model", "README.md", REPORT))


def require_unfinished(output: Path) -> None:
    """Raise FinetuneError where a fine-tune has ended there."""
    if (output / REPORT).is_file():
        raise FinetuneError(
            f"{output} has a fine-tuned model already, and nothing is left to do; name another "
            "output to train one more"
        )
