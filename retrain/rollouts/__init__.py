"""Rollouts: drawn turn by turn for many problems at once, graded, and handed to the updates."""
