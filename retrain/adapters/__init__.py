"""What is done with trained adapters: compress, verify, export, continue, talk to."""
