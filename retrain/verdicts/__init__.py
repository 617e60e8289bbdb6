"""What runs found: results, comparisons, the rules that decide, verdicts in words, and the report."""
