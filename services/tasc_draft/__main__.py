"""The command ``tasc-draft``, also ``python -m tasc_draft``.

``tasc-draft index`` makes an index from a file of rows, for `tasc_draft.vllm` and other engines.
``tasc-draft compile`` compiles most of the code for drafting into numba's cache. This takes up to a
minute and needs only numpy and numba, so `make` runs it during the installation of other packages.
Code for other sizes and settings is compiled at its first use.
"""

import argparse
import gzip
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tasc_draft.drafts import DraftError, Tokens
from tasc_draft.index.draft_index import INDEX_FILE, write_index
from tasc_draft.mixture.proposer import NgramProposer
from tasc_draft.replaying import build_learnt_index
from tasc_draft.settings import DraftSettings

_EOS = 8
_ROWS = """\
ROWS is a file of JSON lines, which may be compressed with gzip. A row is one of:
  {"messages": [...]}                the last message is the assistant's answer
  {"input": ..., "output": ...}      the input is the message of a user
  {"prompt": ..., "output": ...}     the prompt is used as it is, like that of a completion
Messages are rendered with the model's chat template, as vLLM renders those of a chat completion.

example:
  tasc-draft index rows.jsonl --model my-model --to my-index
"""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command; a mistake in the arguments or in the rows exits with 2."""
    parser = argparse.ArgumentParser("tasc-draft", description="Draft indexes from task outputs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    form = argparse.RawDescriptionHelpFormatter
    command = commands.add_parser(
        "index", help="make an index from a file of rows", epilog=_ROWS, formatter_class=form
    )
    command.add_argument("rows", metavar="ROWS", type=Path, help="file of JSON lines; see below")
    command.add_argument("--model", required=True, help="folder or hub name of the target")
    command.add_argument(
        "--to", required=True, type=Path, metavar="FOLDER", help=f"folder for {INDEX_FILE}"
    )
    command.add_argument("--system", help="system prompt of rows with an input")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    command.set_defaults(run=index)
    command = commands.add_parser("compile", help="compile the code for drafting ahead")
    command.set_defaults(run=compile_ahead)
    given = parser.parse_args(arguments)
    try:
        given.run(given)
    except (DraftError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def index(given: argparse.Namespace) -> None:
    """Makes an index from a file of rows."""
    from tasc_text import TextError, open_tokenizer, resolve_folder

    try:
        folder = resolve_folder(given.model, weights=False)
        tokenizer = open_tokenizer(folder)
    except TextError as error:
        raise DraftError(str(error)) from error
    prompts, texts = list[list[int]](), list[str]()
    renderer: Any = None
    for where, row in _rows(given.rows):
        prompt, output = _split(row, where, given.system)
        if isinstance(prompt, str):
            prompts.append(tokenizer.encode_prompt(prompt))
        else:
            renderer = renderer or _chat_tokenizer(folder)
            try:
                ids = renderer.apply_chat_template(
                    prompt, add_generation_prompt=True, return_dict=False
                )
            except Exception as error:  # templates raise what they like
                raise DraftError(f"{where}: the chat template refuses it: {error}") from error
            prompts.append(list(ids))
        texts.append(output)
    if not texts:
        raise DraftError(f"{given.rows} has no rows; write one JSON object per line")
    print(
        f"{len(texts):,} rows are read; now their index is made, and in a first run its code is "
        "compiled, which takes a minute",
        file=sys.stderr,
    )
    outputs = tokenizer.encode_outputs(texts)
    facts = tokenizer.index_facts
    made = build_learnt_index(Tokens.of(outputs), Tokens.of(prompts), **facts)
    given.to.mkdir(parents=True, exist_ok=True)
    path = given.to / INDEX_FILE
    write_index(made, path)
    found = {"path": str(path), "rows": len(texts), "size_bytes": path.stat().st_size}
    text = f"{path}: {len(texts):,} rows, {found['size_bytes']:,} bytes"
    print(json.dumps(found) if given.json else text)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file, each with its place for messages."""
    opened: Any = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                where = f"{file}, line {number}"
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise DraftError(f"{where} is no JSON object; see tasc-draft index --help")
                    yield where, row
        except (EOFError, zlib.error) as error:
            raise DraftError(f"{file} is no whole gzip file ({error}); write it again") from error
        except UnicodeDecodeError as error:
            raise DraftError(f"{file} is not UTF-8 ({error}); convert it") from error
        except json.JSONDecodeError as error:
            raise DraftError(f"{where} is not JSON ({error}); mend or remove it") from error


def _split(row: dict[str, Any], where: str, system: str | None) -> tuple[Any, str]:
    """The prompt of a row, as a text or as messages, and its output."""
    turns: Any = row.get("messages")
    if isinstance(turns, list):
        if len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns):
            raise DraftError(f"{where}: messages must have a question and an assistant's answer")
        answer = turns[-1].get("content")
        if turns[-1].get("role") == "assistant" and isinstance(answer, str):
            return turns[:-1], answer
        raise DraftError(f"{where}: the last of messages must be an assistant's text")
    output, prompt, value = (row.get(name) for name in ("output", "prompt", "input"))
    if isinstance(output, str) and isinstance(prompt, str):
        return prompt, output
    if isinstance(output, str) and isinstance(value, str):
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, {"role": "user", "content": value}], output
    raise DraftError(
        f"{where} has the fields {', '.join(row)}; it needs messages, or a text as output and one "
        "as input or prompt: see tasc-draft index --help"
    )


def _chat_tokenizer(folder: Path) -> Any:
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ImportError as error:
        raise DraftError("chats need transformers: pip install 'tasc-draft[chat]'") from error
    if not tokenizer.chat_template:
        raise DraftError(
            f"{folder} has no chat template, so that messages cannot be rendered; give each row a "
            "prompt instead"
        )
    return tokenizer


def compile_ahead(_: argparse.Namespace) -> None:
    """Builds an index of random tokens and drafts from it with each mixture."""
    texts = Tokens.of(np.random.default_rng(0).integers(0, _EOS, (400, 6)).tolist())
    made = build_learnt_index(
        texts,
        texts,
        fingerprint="f",
        vocab_size=_EOS + 1,
        eos_id=_EOS,
        settings=DraftSettings(),
        word_starts=np.ones(_EOS + 2, np.bool_),
        canonical=np.arange(_EOS + 2, dtype=np.int32),
    )
    rows, budget = np.array([0], np.int32), np.array([8], np.int32)
    for mixture in ("mixed", "tasc", "trie"):
        settings = DraftSettings(mixture=mixture, min_prob=0.0)
        proposer = NgramProposer(
            settings, rows=2, capacity=64, vocab_size=_EOS + 1, eos_ids=(_EOS,), index=made
        )
        proposer.start(0, np.array([1, 2, 3], np.int32))
        for _step in range(2):
            proposer.propose(rows, budget)
            proposer.observe(0, np.array([4, 5], np.int32))
        proposer.finish(0)


if __name__ == "__main__":
    main()
