"""The pytest plugin: light at load."""
