"""Tokenizers of two kinds: byte-level, and sentencepiece-like with byte tokens."""

import pytest

from tasc_text import TaskTokenizer
from tiny import make_tokenizer, sentencepiece

PIECES = ("▁", "▁▁", "a", "b", "ab", "▁a", "▁b", "▁ab", "東", "🙂", ".", "n", "'", "t")
MERGES = [("▁", "▁"), ("a", "b"), ("▁", "a"), ("▁", "b"), ("▁", "ab")]


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    make_tokenizer(folder)
    return TaskTokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    """A tokenizer like those of Llama 2, Mistral and Phi-3."""
    tokenizer = sentencepiece(PIECES, MERGES, ("<unk>", "<s>", "</s>"), prepend=True)
    path = tmp_path_factory.mktemp("byte_fallback") / "tokenizer.json"
    tokenizer.save(str(path))
    return TaskTokenizer(path, [tokenizer.token_to_id("</s>")])


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> TaskTokenizer:
    found: TaskTokenizer = request.getfixturevalue(request.param)
    return found
