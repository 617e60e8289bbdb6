"""Models on this machine: bundled ones, and files of others."""
