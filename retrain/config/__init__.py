"""Declare every configuration key once; report all mistakes at once.

``load`` reads a TOML file, ``parse_dict`` plain data; both give a frozen `Config` or raise one `ConfigError`.
"""

from retrain.config.campaign import CampaignSection, Condition
from retrain.config.loading import LoadedConfig, load, parse_dict
from retrain.config.root import Config
from retrain.config.schema import json_schema

__all__ = ["CampaignSection", "Condition", "Config", "LoadedConfig", "json_schema", "load", "parse_dict"]
