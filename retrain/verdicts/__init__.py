"""Results of runs, their comparison, the verdict rule and its wording, and the report."""
