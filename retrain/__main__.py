"""``python -m retrain`` is the command ``retrain``."""

from __future__ import annotations

from retrain.cli import main

if __name__ == "__main__":
    main()
