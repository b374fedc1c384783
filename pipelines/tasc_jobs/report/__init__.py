"""Reports as data, in a terminal, and as a page."""
