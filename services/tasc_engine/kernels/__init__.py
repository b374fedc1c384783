"""Attention and vector code, compiled for CPUs and GPUs, and in plain torch."""

import sys

MAX_LOGIT = sys.float_info.max  # biases and penalties never lift a logit above
IN_PROMPT = 1 << 30  # a flag in the count of a token: it is in the prompt
