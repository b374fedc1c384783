"""What jobs run in: progress and stages, and a Ray of their own."""
