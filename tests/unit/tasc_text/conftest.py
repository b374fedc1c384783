"""Tokenizers of the two kinds there are: byte-level, and sentencepiece-like with byte tokens."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers

from tasc_text import TaskTokenizer
from tiny import make_tokenizer

PIECES = ("▁", "▁▁", "a", "b", "ab", "▁a", "▁b", "▁ab", "東", "🙂", ".", "n", "'", "t")
MERGES = [("▁", "▁"), ("a", "b"), ("▁", "a"), ("▁", "b"), ("▁", "ab")]


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = tmp_path_factory.mktemp("byte_level")
    make_tokenizer(folder)
    return TaskTokenizer.from_folder(folder)


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    """As Llama 2, Mistral and Phi-3 have it: what is no piece becomes ``<0xNN>`` tokens."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    vocab = {name: at for at, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=MERGES, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    path = tmp_path_factory.mktemp("byte_fallback") / "tokenizer.json"
    tokenizer.save(str(path))
    return TaskTokenizer(path, [vocab["</s>"]])


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> TaskTokenizer:
    found: TaskTokenizer = request.getfixturevalue(request.param)
    return found
