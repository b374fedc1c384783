"""Triton kernels: attention over the rows of a step."""
