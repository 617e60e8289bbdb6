"""``python -m retrain`` is the command ``retrain``."""

from retrain.cli.app import main

if __name__ == "__main__":
    main()
