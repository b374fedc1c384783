"""Rows of files and tables, and the draft index of a corpus outside a store."""
