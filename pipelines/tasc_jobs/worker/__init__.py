"""`tasc worker`: takes batches that clients have created over HTTP, and answers their lines."""
