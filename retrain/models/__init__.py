"""Models on this machine: those that ship with the package, and files of others."""
