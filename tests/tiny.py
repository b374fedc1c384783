"""Makes tiny random models and tokenizers in real Hugging Face folders, without downloads."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from tasc_text import TaskTokenizer

END = "<|end|>"
SENTENCES = (
    "wake me up at nine am on friday",
    "set an alarm for two hours from now",
    "intent: alarm_set, slot fills: {time: nine am, date: friday}",
    "intent: play_music, slot fills: {artist: the beatles}",
    "DET NOUN VERB ADP PROPN PUNCT",
    "naïve café, 東京 🙂",
)
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
# Name: its config, and what differs from the shape above. A window of 16 is outgrown by most rows.
ARCHITECTURES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (Qwen2Config, {}),
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"sliding_window": 16}),
    "qwen3": (Qwen3Config, {}),
    "gemma2": (Gemma2Config, {"sliding_window": 16, "query_pre_attn_scalar": 8}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 16, "query_pre_attn_scalar": 8}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "phi": (PhiConfig, {}),
}


def byte_level(
    texts: Sequence[str] = SENTENCES, size: int = 320, special: Sequence[str] = (END,)
) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return made


def sentencepiece(
    pieces: Sequence[str],
    merges: Sequence[tuple[str, str]],
    special: Sequence[str],
    prepend: bool = False,
) -> Tokenizer:
    """Makes a tokenizer like converted SentencePiece models, with ``<0xNN>`` byte tokens.

    Args:
        special: Special tokens, including ``<unk>``.
        prepend: Whether a blank is put before a text, as in Llama 2 and Mistral.
    """
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {name: at for at, name in enumerate(dict.fromkeys(names))}
    made = Tokenizer(models.BPE(vocab, list(merges), unk_token="<unk>", byte_fallback=True))
    blank, prepended = normalizers.Replace(" ", "▁"), normalizers.Prepend("▁")
    made.normalizer = normalizers.Sequence([prepended, blank]) if prepend else blank
    text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*text, *[decoders.Strip(" ", 1, 0)] * prepend])
    made.add_special_tokens(list(special))
    return made


def make_tokenizer(folder: Path, texts: Sequence[str] = SENTENCES, size: int = 320) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    byte_level(texts, size).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_model(
    folder: Path,
    architecture: str = "qwen2",
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    sharpness: float = 6.0,
    tied: bool = False,
) -> PreTrainedModel:
    """Makes a random model for the tokenizer in ``folder``; saves it there and returns it.

    ``sharpness`` scales the LM head, so that the best token is clearly better than the second.
    """
    torch.manual_seed(seed)
    tokenizer = TaskTokenizer.from_folder(folder)
    make, differs = ARCHITECTURES[architecture]
    own = {"vocab_size": tokenizer.vocab_size, "eos_token_id": list(tokenizer.eos_ids)}
    config = make(**{**SHAPE, **own, "tie_word_embeddings": tied, **differs})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(4.0)
        model.get_output_embeddings().weight.mul_(sharpness)
    model.save_pretrained(folder)
    return model


def make_folder(folder: Path, architecture: str = "qwen2", **kwargs: object) -> Path:
    make_tokenizer(folder)
    make_model(folder, architecture, **kwargs)
    return folder


@torch.inference_mode()
def plain(model: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Returns the answer of transformers' own ``generate`` to a single request."""
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
