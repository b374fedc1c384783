"""Registering tasks: options to records, and whether a model can do what a record asks of it.

No model is loaded: a folder's tokenizer, settings and weight headers are read. No torch.
"""
