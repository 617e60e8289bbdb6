"""Problems: sources, held-out sets, and prompts as tokens."""

from retrain.data.dataset import Dataset, content_hash, load_data

__all__ = ["Dataset", "content_hash", "load_data"]
