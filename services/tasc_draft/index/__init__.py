"""A task's draft index: its parts, how they are built, looked at and kept in a file. No drafts."""
