"""What can go wrong with a draft index."""


class DraftError(ValueError):
    """Root of this package's errors."""


class IndexFileError(DraftError):
    """An index file is truncated, foreign, damaged or of another format version."""
