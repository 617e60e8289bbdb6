"""The commands behind ``retrain``: one function each; what they need is imported when they run."""
