"""`retrain ui`: a local page over the directories of runs, and the JSON that it reads."""
