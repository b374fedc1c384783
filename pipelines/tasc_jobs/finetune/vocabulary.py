"""What a fine-tune's tokenizer has beyond its base model's, and what ends an answer.

A tokenizer that was enriched from another model's would be trained upon without a word, and so
would an end that the model does not end by; both are refused here. It knows no weights.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasc_jobs.enrich.saving import RECORD, named_end
from tasc_jobs.finetune.errors import FinetuneError
from tasc_text import TaskTokenizer, TokenizerError
from tasc_text.tokenizer_file import open_tokenizer

Parts = Mapping[int, Sequence[int]]
"""Of each new token's id, the ids of the tokens it stands for, in the order they were added."""


@dataclass(frozen=True)
class AddedVocabulary:
    """The tokens of a fine-tune.

    Attributes:
        tokenizer: Its first end is the one that rows are learnt with; any ends an answer.
        parts: Empty where nothing is new.
    """

    tokenizer: TaskTokenizer
    parts: Parts

    @property
    def ends(self) -> int | list[int]:
        """As settings files have them."""
        ids = self.tokenizer.eos_ids
        return ids[0] if len(ids) == 1 else list(ids)

    @property
    def end(self) -> str:
        """The text of the one that is learnt."""
        return str(self.tokenizer.backend.id_to_token(self.tokenizer.eos_id))


def vocabulary_of(base: Path, folder: Path, eos: str | None = None) -> AddedVocabulary:
    """The tokenizer of ``folder``, held against that of ``base``.

    Args:
        base: Folder of the model.
        folder: The same, or what `tasc enrich` made of its tokenizer.
        eos: Text of the token that is to end answers, whatever the two say.

    Raises:
        FinetuneError: It is of another model, its record is damaged, or the two end otherwise.
        TokenizerError: One of them cannot be read, or has no such token.
    """
    given = open_tokenizer(folder, eos) if eos else _by_its_end(folder)
    if folder.resolve() == base.resolve():
        return AddedVocabulary(given, {})
    models = _ends_of(base)
    tokenizer = TaskTokenizer(given.path, given.eos_ids if eos else _agreed(given, models, base))
    own = TaskTokenizer(base / given.path.name, given.eos_ids)
    if given.fingerprint == own.fingerprint:
        return AddedVocabulary(tokenizer, {})
    return AddedVocabulary(tokenizer, _new(tokenizer, own, models))


def _by_its_end(folder: Path) -> TaskTokenizer:
    """Of several ends the one that the tokenizer's settings name is learnt: chats end by it."""
    try:
        found = TaskTokenizer.from_folder(folder)
    except TokenizerError as error:
        if error.__cause__ or not (folder / "tokenizer.json").is_file():
            raise
        raise FinetuneError(f"nothing in {folder} says what ends an answer; give --eos") from error
    named = named_end(found)
    if named is None:
        return found
    return TaskTokenizer(found.path, (named, *(id_ for id_ in found.eos_ids if id_ != named)))


def _ends_of(folder: Path) -> tuple[int, ...]:
    """What a folder says that ends answers; none where it says nothing."""
    try:
        return TaskTokenizer.from_folder(folder).eos_ids
    except TokenizerError as error:
        if error.__cause__:
            raise
        return ()


def _agreed(given: TaskTokenizer, models: Sequence[int], base: Path) -> tuple[int, ...]:
    """The end of rows, then the model's others."""
    learnt = given.eos_id
    if not models:
        return given.eos_ids
    if learnt not in models:
        own, others = given.backend.id_to_token(learnt), map(given.backend.id_to_token, models)
        raise FinetuneError(
            f"rows would be learnt to end with {own!r}, as {given.path.parent} says, and {base} "
            f"ends answers by {' or '.join(map(repr, others))}; name the one that is right with "
            "--eos"
        )
    return (learnt, *(id_ for id_ in models if id_ != learnt))


def _new(tokenizer: TaskTokenizer, base: TaskTokenizer, models: Sequence[int]) -> Parts:
    """What the record says of each token that the base has not.

    Args:
        models: What ends the base's answers.
    """
    folder = tokenizer.path.parent
    own, grown = (t.backend.get_vocab(with_added_tokens=True) for t in (base, tokenizer))
    if not own.items() <= grown.items():
        raise FinetuneError(_of_another(folder, base))
    parts: dict[int, list[int]] = {}
    known, file = set(own.values()), folder / RECORD
    if file.is_file():
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            of = record["base_fingerprint"], record["base_vocab_size"]
            parts = _parts(record["tokens"], known)
        except (ValueError, KeyError, TypeError) as error:
            raise FinetuneError(
                f"{file} is damaged ({error!r}); run `tasc enrich` again"
            ) from error
        # A fingerprint is of the ends too, and `tasc enrich` may have been told others than these.
        ends = {base.eos_ids, tuple(models), _ends_of(folder)} - {()}
        known_as = [TaskTokenizer(base.path, each).fingerprint for each in ends]
        if of[0] not in known_as or of[1] != base.vocab_size:
            raise FinetuneError(_of_another(folder, base))
    if strange := sorted(set(grown.values()) - known - parts.keys()):
        raise FinetuneError(
            f"{folder} has {len(strange)} tokens that {base.path.parent} has not, the first is "
            f"{tokenizer.backend.id_to_token(strange[0])!r}, and no {RECORD} that says what they "
            "stand for; take the folder as `tasc enrich` wrote it"
        )
    return parts


def _parts(tokens: Any, known: set[int]) -> dict[int, list[int]]:
    """Raises ValueError where a token stands for none, or for one that was not there before it."""
    found: dict[int, list[int]] = {}
    for token in tokens:
        id_, parts = token["id"], token["parts"]
        if id_ in known or not parts or not all(p in known or p in found for p in parts):
            raise ValueError(f"token {id_} stands for {parts}")
        found[id_] = parts
    return found


def _of_another(folder: Path, base: TaskTokenizer) -> str:
    return (
        f"{folder} was not enriched from the tokenizer of {base.path.parent}; run `tasc enrich "
        f"--tokenizer {base.path.parent}`, or name the model that it was made for"
    )
