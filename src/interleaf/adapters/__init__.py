"""Adapters, from a PEFT folder to pages and back. Imports nothing here: registry and residency work without torch."""
