"""Sampling: parameters of a request, and the token that they choose from logits."""
