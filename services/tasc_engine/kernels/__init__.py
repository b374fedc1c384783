"""Attention and vector code, compiled for CPUs and GPUs, and in plain torch."""
