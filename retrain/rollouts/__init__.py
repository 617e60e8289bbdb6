"""Rollouts: sampled turn by turn for many problems at once, graded, and handed to the updates."""
