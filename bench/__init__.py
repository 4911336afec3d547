"""Measurements of Interleaf beside its peers; no part of the package."""
