"""Define the commands of ``retrain``, one function each; heavy imports happen when a command runs."""
