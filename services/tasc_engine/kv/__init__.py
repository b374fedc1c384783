"""The KV cache: its memory, which slots a request holds, and shared prompt prefixes."""
