"""HTTP in, events out: the server sees an engine only as an `AsyncEngine`."""
