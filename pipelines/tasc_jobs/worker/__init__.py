"""`tasc worker`: takes batches that clients have asked for over HTTP, and answers their lines."""
