"""Raw records of a JSON lines file, plain or gzipped, one by one.

Every line gives one record, a damaged one too, and no more than the longest line allowed is ever in
memory. It does not know which fields a row needs.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

from tasc_jobs.records import SHOWN_CHARACTERS, RawRecord, too_long

DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
_SKIP_BYTES = 1 << 16

_Stream = IO[bytes] | gzip.GzipFile


def check_json_lines(path: Path) -> None:
    """Opens the file and reads its first byte.

    Raises:
        OSError: It cannot be opened or read.
        EOFError, zlib.error, gzip.BadGzipFile: It is no gzip file, though named so.
    """
    with closing(_open(path)) as stream:
        stream.read(1)


def read_json_lines(path: Path, max_bytes: int) -> Iterator[RawRecord]:
    """Every line in file order; blank lines are counted, not given.

    A damaged gzip file gives the lines before the damage, then a record with the reason.

    Raises:
        OSError: It cannot be opened or read.
    """
    line = 0
    with closing(_open(path)) as stream:
        try:
            for line, (raw, fits) in enumerate(_bounded_lines(stream, max_bytes), start=1):
                if not fits:
                    yield RawRecord(line, None, _shown(raw), too_long(max_bytes))
                elif raw.strip():
                    yield _parsed(line, raw)
        except DAMAGED as error:
            yield RawRecord(line + 1, None, "", f"damaged gzip, the rest is lost: {error}")


def _open(path: Path) -> _Stream:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _bounded_lines(stream: _Stream, max_bytes: int) -> Iterator[tuple[bytes, bool]]:
    """Each line's beginning, and whether that is all of it."""
    while raw := stream.readline(max_bytes + 1):
        fits = len(raw) <= max_bytes or raw.endswith(b"\n")
        rest = raw
        while rest and not (fits or rest.endswith(b"\n")):
            rest = stream.readline(_SKIP_BYTES)
        yield raw, fits


def _parsed(line: int, raw: bytes) -> RawRecord:
    try:
        return RawRecord(line, json.loads(raw.decode()), _shown(raw))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start}"
    except RecursionError:
        reason = "not JSON: nested too deep"
    except ValueError as error:
        reason = f"not JSON: {error}"
    return RawRecord(line, None, _shown(raw), reason)


def _shown(raw: bytes) -> str:
    # A character has at most 4 bytes, so this much is enough and a long line is not decoded whole.
    return raw[: 4 * SHOWN_CHARACTERS].decode(errors="replace").rstrip("\r\n")[:SHOWN_CHARACTERS]
