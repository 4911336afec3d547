"""The step on a GPU: index arrays, captured graphs, streams. Decides nothing about requests."""
