"""A taskset in a package."""

from toy_reverse import ReverseTaskset

__all__ = ["ReverseTaskset"]
