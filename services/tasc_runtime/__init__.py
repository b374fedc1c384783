"""From a task's record to a running engine, and what goes in and comes out."""
