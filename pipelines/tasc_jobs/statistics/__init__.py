"""Statistics of the n-grams of a task's texts, which show how variable it is. No model is run."""
