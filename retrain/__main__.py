"""``python -m retrain`` is the command ``retrain``."""

from retrain.cli import main

if __name__ == "__main__":
    main()
