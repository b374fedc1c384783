"""Tasks and all versions of their records."""
