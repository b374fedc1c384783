"""Fine-tunes a model on a task's rows with LoRA, including new tokens."""
