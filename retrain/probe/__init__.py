"""Comparisons of a file's conditions before its campaign: gradients on the same rollouts, and forks of one run."""
