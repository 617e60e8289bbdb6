"""Training: the loop over a cohort of runs, one run and its state, health, checkpoints and evaluations."""
