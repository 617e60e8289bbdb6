"""Plan the runs of a file, check what they refer to, and read the records of earlier starts."""
