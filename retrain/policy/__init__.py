"""The policy: frozen base, LoRA lanes, log-probabilities, updates, and the files an adapter lives in."""

from retrain.policy.adapter_io import read_adapter, save_adapter
from retrain.policy.base import BaseModel, load_base
from retrain.policy.lora import Adapter, Lanes

__all__ = ["Adapter", "BaseModel", "Lanes", "load_base", "read_adapter", "save_adapter"]
