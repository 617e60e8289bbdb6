"""Environments in which the policy acts, adapters for environments of other libraries, and tools."""
