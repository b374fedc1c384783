"""What jobs run in: progress, stages, outcomes, and a Ray of their own."""
