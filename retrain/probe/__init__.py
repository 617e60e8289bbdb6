"""Looks at a file's conditions before its campaign: gradients on the same rollouts, forks of one run, first answers."""
