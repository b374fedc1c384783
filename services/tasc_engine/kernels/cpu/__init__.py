"""Compiled CPU code: attention over the rows of a step, and what lies between linear layers."""
