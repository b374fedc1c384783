"""Makes small tokenizers of the families that can be enriched, for tests."""

import json

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

import tiny

OUTPUTS = [f"intent: {a}_{b}, slots: {{{c}}}" for a in ("play", "set") for b in ("music", "alarm")
           for c in ("", "time: nine", "café: crème brûlée", "x\ny")] * 3  # fmt: skip
MARK = "\u2581"
PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False)
WORDS = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}{1,3}|\s+|."), "isolated")
INNER = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
MARKS, DIGITS = pre_tokenizers.Punctuation("contiguous"), pre_tokenizers.Digits(False)
BYTES = {
    "gpt2": (None, PLAIN),
    "neox": (normalizers.NFC(), PLAIN),
    "olmo": (None, pre_tokenizers.Sequence([WORDS, INNER])),
    "falcon": (None, pre_tokenizers.Sequence([MARKS, PLAIN, DIGITS])),
}


def byte_level(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    normalizer, tokenizer.pre_tokenizer = BYTES[name]
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(OUTPUTS, trainer(alphabet, 300, [tiny.END]))
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Makes a tokenizer like those of Llama 2 and Phi-3, with marks for blanks and before texts."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    marks = [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    tokenizer.normalizer = normalizers.Sequence(marks)
    blanks = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*blanks, decoders.Strip(" ", 1, 0)])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = [text for text in OUTPUTS if text.isascii() and "\n" not in text]
    tokenizer.train_from_iterator(texts, trainer([], 340, ["<unk>", *bytes_]))
    state = json.loads(tokenizer.to_str())  # bytes are tokens of the model, as in these families
    state["added_tokens"] = [t for t in state["added_tokens"] if t["content"] == "<unk>"]
    made = Tokenizer.from_str(json.dumps(state))
    made.add_special_tokens([tiny.END])
    return made


def gemma() -> Tokenizer:
    """Makes a tokenizer like that of Gemma, with marks for blanks only."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = normalizers.Replace(" ", MARK)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    blanks = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(blanks)
    return tokenizer


def old_bert() -> Tokenizer:
    """A tokenizer with normalized special tokens that include the white space beside them."""
    tokenizer = byte_level("gpt2")
    tokenizer.add_special_tokens([AddedToken(text, normalized=True) for text in ("<sep>", "}{")])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, normalized=True)])
    tokenizer.add_tokens([AddedToken("  ", normalized=True), AddedToken("|||", normalized=False)])
    return tokenizer


def trainer(alphabet: list[str], size: int, special: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )


MAKERS = {
    **{name: lambda name=name: byte_level(name) for name in BYTES},
    "phi-3": sentencepiece, "gemma": gemma, "old-bert": old_bert,
}  # fmt: skip
