"""Start the workers of a campaign and monitor whether they live."""
