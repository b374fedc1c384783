"""Compiled CPU code: attention over the rows of a step, and operations between linear layers."""
