"""Campaigns: which runs there are (planning), how they run (running), what they found (judging), and their adapters."""
