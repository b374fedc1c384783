"""Sampling: parameters of requests, and the choice of tokens from logits."""
