"""`retrain mine`: strategic grams from the completions that a run recorded."""
