"""Isolated processes for code that a model writes."""
