"""Leases of directories, requests to stop, copies in object stores, answers in texts, child processes, formats."""
