"""Registers tasks: makes records of options, and checks that a model supports a record.

No model is loaded, and torch is not needed. Only a folder's tokenizer, settings and the headers of
its weight files are read.
"""
