"""Turns plans into tokens, and requests into plans. Knows no HTTP."""
