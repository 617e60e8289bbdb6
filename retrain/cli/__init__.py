"""The commands of ``retrain``, one function each, behind ``app.main``; heavy imports happen when a command runs."""
