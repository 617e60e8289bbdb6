"""The self-check: what retrain relies on, proven on the user's own machine (``retrain doctor --device``)."""
