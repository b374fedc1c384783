"""Selection of the replica that answers a call, and failover if it dies."""
