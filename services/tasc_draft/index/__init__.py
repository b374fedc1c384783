"""A task's draft index: its parts, their build, look-ups in them, and their file."""
