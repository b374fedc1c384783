"""What a task gains from drafting: replay, tune, forecast, and their reports. No model is run."""
