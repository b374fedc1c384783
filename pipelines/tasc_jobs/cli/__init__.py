"""The `tasc` command: one module per group of commands."""
