"""How variable a task's texts are: counts, figures and reports of n-grams. No model is run."""
