"""Decides what each step computes. Never touches a tensor."""
