"""The policy: frozen base, LoRA lanes, log-probabilities, objectives, updates, and the files an adapter lives in."""
