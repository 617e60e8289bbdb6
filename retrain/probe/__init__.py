"""``retrain probe``: the updates that the conditions of a file would make of the same rollouts, before any run."""
