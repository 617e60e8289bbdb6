"""The JSON of the page, one file for each group of endpoints: ``routes(library)`` of each."""
