"""Tasks: records, every version kept, and what they hold."""
