"""Statistics that show how variable a task's texts are, and measures of the quality of answers."""
