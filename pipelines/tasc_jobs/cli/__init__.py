"""The `tasc` command: one module a group of commands."""
