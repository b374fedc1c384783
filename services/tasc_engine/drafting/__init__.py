"""Drafting: neural proposers, a wrapper for proposers that may fail, and their hidden states."""
