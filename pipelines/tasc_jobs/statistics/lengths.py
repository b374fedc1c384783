"""How long the rows of a side are, in whatever unit they were counted. It knows no text."""

from collections.abc import Mapping
from dataclasses import dataclass

PERCENTILES = (0, 5, 25, 50, 75, 90, 95, 99, 100)
MOST_BINS = 40


@dataclass(frozen=True)
class Bin:
    """So many rows have ``first`` to ``last`` symbols."""

    first: int
    last: int
    rows: int


@dataclass(frozen=True)
class Lengths:
    """Symbols of a row.

    Attributes:
        mean: Of all rows.
        percentiles: By per cent, from the shortest at "0" to the longest at "100": the least
            length that so many per cent of the rows do not exceed.
        histogram: At most 40 bins, of equal width but perhaps for the last.
    """

    mean: float
    percentiles: Mapping[str, int]
    histogram: tuple[Bin, ...]


def row_lengths(rows_by_length: Mapping[int, int]) -> Lengths:
    """The figures of how many rows there are of each length; there must be a row."""
    rows = sum(rows_by_length.values())
    symbols = sum(length * count for length, count in rows_by_length.items())
    return Lengths(symbols / rows, _percentiles(rows_by_length, rows), _histogram(rows_by_length))


def _percentiles(rows_by_length: Mapping[int, int], rows: int) -> dict[str, int]:
    found: dict[str, int] = {}
    wanted, reached = list(PERCENTILES), 0
    for length in sorted(rows_by_length):
        reached += rows_by_length[length]
        while wanted and 100 * reached >= wanted[0] * rows:
            found[str(wanted.pop(0))] = length
    return found


def _histogram(rows_by_length: Mapping[int, int]) -> tuple[Bin, ...]:
    least, most = min(rows_by_length), max(rows_by_length)
    width = -(-(most - least + 1) // MOST_BINS)
    rows = [0] * -(-(most - least + 1) // width)
    for length, count in rows_by_length.items():
        rows[(length - least) // width] += count
    firsts = range(least, most + 1, width)
    return tuple(
        Bin(first, min(first + width - 1, most), count)
        for first, count in zip(firsts, rows, strict=True)
    )
