"""Errors of draft indexes."""


class DraftError(ValueError):
    """Base class of this package's errors."""


class IndexFileError(DraftError):
    """A file is not a draft index, is truncated or damaged, or has another format version."""


class IndexFormatError(IndexFileError):
    """An index file is undamaged, but of a format version that this program does not read."""
