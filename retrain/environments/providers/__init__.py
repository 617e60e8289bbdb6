"""Environments of other libraries, unchanged, as ours."""
