"""The problems that the runs of a plan are asked, in training and in every held-out set; torch is not imported."""

from __future__ import annotations

from pathlib import Path

from retrain.config import Config
from retrain.environments import Dataset, load_data
from retrain.environments.dataset import Wanted


def data_of(config: Config, folder: Path) -> Dataset:
    """The training and held-out problems of a run's configuration. Raises DataError when they cannot be had."""
    wanted = [Wanted(each.name, each.problems, each.data) for each in config.held_out]
    return load_data(config.data, wanted, config.training.max_examples, config.campaign.seed, folder)
