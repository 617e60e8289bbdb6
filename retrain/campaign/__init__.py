"""Campaigns: which runs there are, and what is done with all of them together."""
