"""Tasks: data sources, the split into training and held-out problems, and prompts as tokens."""

from __future__ import annotations

from retrain.environments.dataset import Dataset, content_hash, load_data

__all__ = ["Dataset", "content_hash", "load_data"]
