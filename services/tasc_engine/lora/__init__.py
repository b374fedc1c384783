"""LoRA adapters: read from folders, and applied row by row in one batch."""
