"""Problems: where they come from, which of them are held out, and their prompts as tokens."""

from retrain.data.dataset import Dataset, content_hash, load_data

__all__ = ["Dataset", "content_hash", "load_data"]
