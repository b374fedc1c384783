"""Files and batches of the HTTP API, and the workers that lease them."""
