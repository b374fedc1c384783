"""Splits columns of texts into words, with Arrow's kernels, and into token ids.

White space is that of `str.split`.
"""

import os
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

SIDES = ("input", "output")
TEXT = pa.large_string()  # columns of any size need offsets of 64 bits
BLANK = pa.scalar(" ", TEXT)


def text_column(table: pa.Table, name: str) -> pa.LargeStringArray:
    """Returns a column of texts as one array."""
    return table[name].cast(TEXT).combine_chunks()


def split_words(texts: pa.LargeStringArray) -> pa.ListArray:
    """Splits each text at white space, as `str.split` does; a text without words gives null."""
    # Arrow may read beyond its buffer, and take white space at the end of the last text for a word.
    trimmed = pc.utf8_trim_whitespace(texts)
    # Arrow finds one empty word in an empty text.
    return pc.utf8_split_whitespace(pc.if_else(pc.equal(trimmed, ""), None, trimmed))


def token_ids(
    encode: Callable[[Sequence[str]], list[list[int]]], texts: pa.LargeStringArray
) -> pa.ListArray:
    """Returns the ids of each text as ``list<int32>``; a text that repeats is encoded once."""
    different = texts.dictionary_encode()
    ids = pa.array(encode(different.dictionary.to_pylist()), pa.list_(pa.int32()))
    return ids.take(different.indices)


def one_encoding_thread() -> None:
    """Limit tokenizers to one thread of this process, which has one CPU as a worker of Ray.

    By default, each worker would encode with as many threads as the machine has cores.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def with_previous_words(
    table: pa.Table, before: Mapping[str, str], most: int
) -> tuple[pa.Table, dict[str, str]]:
    """Adds the columns previous_input and previous_output: the last words before each row.

    Args:
        table: Columns input and output, the next part of two running texts.
        before: The last words before the table, by side.
        most: Number of words, at least 1; they are joined by blanks.

    Returns:
        The table, and the last words up to its end, by side.
    """
    after = {}
    for side in SIDES:
        texts = [pa.array([before[side]], TEXT), text_column(table, side)]
        split = split_words(pa.concat_arrays(texts))
        symbols, ends = split.flatten(), split.offsets.to_numpy()[1:]
        places = (ends - back for back in range(most, 0, -1))
        found = (symbols.take(pa.array(at, mask=at < 0)) for at in places)
        # null_handling="skip" would leave out a row without any words before it.
        padded = pc.binary_join_element_wise(*(words.fill_null("") for words in found), BLANK)
        joined = pc.utf8_trim_whitespace(padded)
        table = table.append_column(f"previous_{side}", joined[:-1])
        after[side] = joined[-1].as_py()
    return table, after
