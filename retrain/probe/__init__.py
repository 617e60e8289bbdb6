"""Compare the conditions of a file before they are trained: gradients on the same rollouts, forks, first answers."""
