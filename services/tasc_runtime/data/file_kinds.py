"""Recognises files that are not UTF-8 text with a JSON object per line, by their first bytes.

Editors and spreadsheets write byte order marks and UTF-16, and many tools write one JSON array. A
byte order mark at the beginning of a line is skipped. Any other kind of file causes one error for
the whole file, instead of an error for each line.
"""

import codecs
import json
from typing import Final

MARK: Final = codecs.BOM_UTF8
HEAD_BYTES: Final = 4096

_BY_MAGIC: Final = {
    b"\x1f\x8b": "is compressed with gzip; unpack it, or rename it to .jsonl.gz if it has rows",
    b"PAR1": "is a Parquet file; rename it to .parquet if it has rows",
    b"PK\x03\x04": "is a ZIP archive or a spreadsheet; unpack it, or export its rows as JSON lines",
    b"version https://git-lfs": "is a pointer of Git LFS; fetch the file with `git lfs pull`",
}


def wrong_encoding(head: bytes) -> str | None:
    """Explains why a file is not UTF-8, with a remedy; None if its first bytes may be UTF-8."""
    encoding = json.detect_encoding(head[:4]).upper()
    if encoding.startswith("UTF-8"):
        return None
    return f"is {encoding} text; save it as UTF-8, as `iconv -f {encoding} -t UTF-8` does"


def wrong_kind(head: bytes) -> str | None:
    """Explains why a file does not have a JSON object on each line, with a remedy.

    Args:
        head: The first bytes; `HEAD_BYTES` are enough.

    Returns:
        The end of a message that begins with the file's name; None if the file may be right.
    """
    for magic, kind in _BY_MAGIC.items():
        if head.startswith(magic):
            return kind
    if encoding := wrong_encoding(head):
        return encoding
    text = head.removeprefix(MARK).lstrip()
    first, _, rest = (part.strip() for part in text.partition(b"\n"))
    has_rows = rest.startswith(b"{")  # then the first line is a damaged row
    if first.startswith(b"[") and not (first.endswith(b"]") and has_rows):
        return "is a JSON array; write one object on each line, as `jq -c '.[]'` does"
    if first == b"{" and rest and not has_rows:
        return "has JSON objects over several lines; write each on one line, as `jq -c .` does"
    return None
