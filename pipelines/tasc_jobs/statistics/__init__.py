"""Statistics of a task's texts, which show how variable it is, and the quality of answers."""
