"""The demo on shipped data, and the data and models it uses."""
