"""What can go wrong with a draft index."""


class DraftError(ValueError):
    """Root of this package's errors."""


class IndexFileError(DraftError):
    """An index file is truncated, foreign, damaged or of another format version."""


class IndexFormatError(IndexFileError):
    """An index file is whole, and of a format version that this program does not read."""
