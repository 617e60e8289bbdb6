"""Samples rollouts turn by turn for many problems at once and grades them."""
