"""Work with trained adapters: compress, verify, export, continue, sample."""
