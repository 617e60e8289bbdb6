"""Executors: what starts the workers of a campaign, and watches whether they live."""
