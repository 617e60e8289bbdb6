"""Environments of the policy, their providers, and tools."""
