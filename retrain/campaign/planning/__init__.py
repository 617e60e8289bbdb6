"""From a file to runs: which there are, what they refer to and cost, and what a directory holds of them."""
