"""Immutable versions of draft indexes and other files, in Redis and on local disks."""
