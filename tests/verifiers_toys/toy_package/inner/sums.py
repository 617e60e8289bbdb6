"""An environment with load_environment, in a package."""

from toy_classic import load_environment

__all__ = ["load_environment"]
