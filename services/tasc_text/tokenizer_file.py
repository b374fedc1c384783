"""A tokenizer for replays: a model's, or a ``tokenizer.json`` alone. It reads no rows."""

from pathlib import Path

from tasc_text import TaskTokenizer, TokenizerError

FILE = "tokenizer.json"
# Names that model families give the token that ends an answer, the commonest first.
_USUAL = ("<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "<|end_of_text|>", "<|eos|>", "[EOS]")
_SHOWN = 8


def open_tokenizer(path: Path, eos: str | None = None) -> TaskTokenizer:
    """Load a tokenizer and find the token that ends an answer.

    It is ``eos``, else what the settings files beside ``tokenizer.json`` say, else the special
    token with the commonest of the usual names.

    Args:
        path: A folder with a ``tokenizer.json``, or such a file.
        eos: The token's text.

    Raises:
        TokenizerError: There is no such file, it is damaged, or no such token is found.
    """
    bare = open_to_encode(path)
    file = bare.path
    if eos is not None:
        return TaskTokenizer(file, [_id_of(bare, eos, file)])
    if file.name == FILE and (found := _as_settings_say(file.parent)):
        return found
    special = _special(bare)
    usual = next((special[name] for name in _USUAL if name in special), None)
    if usual is None:
        shown = ", ".join(list(special)[:_SHOWN]) or "none"
        raise TokenizerError(
            f"{file} and the settings beside it name no end-of-sequence token; name one with "
            f"--eos, as in --eos '</s>' (special tokens there: {shown})"
        )
    return TaskTokenizer(file, [usual])


def open_to_encode(path: Path) -> TaskTokenizer:
    """Load a tokenizer for texts only: what it says of the end of an answer means nothing.

    Args:
        path: A folder with a ``tokenizer.json``, or such a file.

    Raises:
        TokenizerError: There is no such file, or it is damaged.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(f"{path} is no {FILE} and no folder with one; name either")
    return TaskTokenizer(file, (0,))


def _id_of(tokenizer: TaskTokenizer, eos: str, file: Path) -> int:
    found = tokenizer.backend.token_to_id(eos)
    if found is None:
        raise TokenizerError(f"{file} has no token {eos!r}; name one of its tokens with --eos")
    return int(found)


def _as_settings_say(folder: Path) -> TaskTokenizer | None:
    try:
        return TaskTokenizer.from_folder(folder)
    except TokenizerError as error:
        if error.__cause__:  # a settings file that cannot be read
            raise
        return None


def _special(tokenizer: TaskTokenizer) -> dict[str, int]:
    added = tokenizer.backend.get_added_tokens_decoder()
    return {str(token.content): id_ for id_, token in added.items() if token.special}
