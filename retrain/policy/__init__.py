"""The policy: frozen base, LoRA lanes, log-probabilities, objectives, updates, and the files of an adapter."""
