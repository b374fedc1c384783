"""Small tokenizers with chat templates that are structured like those of four model families.

The templates are short ones of our own. They share with the originals the markers of turns, the
place of a system prompt, the beginning-of-sequence token, and the head of an answer. Like the
original ones, the tokenizers of Llama 3 and Gemma add a beginning-of-sequence token to each text.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, processors

from tiny import SENTENCES, byte_level, sentencepiece

QWEN: Final = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n' }}{% endif %}
{%- endif %}"""
LLAMA: Final = """\
{% set ns = namespace(first=true) %}
{% for message in messages %}
{% set turn = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
   + message['content'] | trim + '<|eot_id|>' %}
{% if ns.first %}{% set turn = bos_token + turn %}{% set ns.first = false %}{% endif %}
{{ turn }}{% endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
GEMMA: Final = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
PHI: Final = """\
{% for message in messages %}
{% if message['role'] in ('system', 'user', 'assistant') %}
{{ '<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>' + '\n' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|assistant|>' + '\n' }}{% else %}{{ eos_token }}{% endif %}"""

# The template of each family, its special tokens, and those that templates use by name.
FAMILIES: Final[dict[str, tuple[str, tuple[str, ...], dict[str, str]]]] = {
    "qwen": (QWEN, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), {"eos_token": "<|im_end|>"}),
    "llama": (
        LLAMA,
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
            "<|eot_id|>",
        ),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    ),
    "gemma": (
        GEMMA,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"},
    ),
    "phi": (
        PHI,
        ("<unk>", "<s>", "</s>", "<|assistant|>", "<|end|>", "<|system|>", "<|user|>"),
        {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"},
    ),
}
_AWKWARD = (" ", "\n", "{{ 1 }}", "{% if", "é🙂", "\t", "''", "<")


def make_chat_tokenizer(folder: Path, family: str) -> Path:
    """Makes a tokenizer's folder; two families have the template in a file, two in the settings."""
    template, special, named = FAMILIES[family]
    folder.mkdir(parents=True, exist_ok=True)
    made = _sentencepiece(special) if family in ("gemma", "phi") else byte_level(special=special)
    if family in ("llama", "gemma"):
        bos = named["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            f"{bos} $A", None, [(bos, made.token_to_id(bos))]
        )
    made.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if family in ("qwen", "gemma"):
        (folder / "chat_template.jinja").write_text(template)
    else:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _sentencepiece(special: Sequence[str]) -> Tokenizer:
    letters = sorted({letter for text in SENTENCES for letter in text.replace(" ", "▁")})
    merges = [("▁", "▁"), ("a", "t"), ("▁", "a"), ("▁a", "t"), ("o", "r"), ("n", "e")]
    return sentencepiece(["▁", *letters, *(a + b for a, b in merges)], merges, special)


def conversations(family: str, count: int, seed: int) -> list[list[dict[str, str]]]:
    """Returns random conversations that the family's template accepts."""
    draw = random.Random(f"{family} {seed}")
    return [_conversation(draw, family) for _ in range(count)]


def _conversation(draw: random.Random, family: str) -> list[dict[str, str]]:
    turns = draw.randint(1, 6)
    roles = ["user" if turn % 2 == 0 else "assistant" for turn in range(turns)]
    if family != "gemma":
        if draw.random() < 0.2:  # all templates except Gemma's accept any order
            draw.shuffle(roles)
        if draw.random() < 0.5:
            roles.insert(0, "system")
    return [{"role": role, "content": _text(draw, family)} for role in roles]


def _text(draw: random.Random, family: str) -> str:
    pieces = (*SENTENCES, *FAMILIES[family][1], *_AWKWARD)
    return "".join(draw.choice(pieces) for _ in range(draw.randint(0, 6)))
