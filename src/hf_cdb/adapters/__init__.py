from .base import LoopAdapter, adapter_for, register_adapter
from .dory import DoryAdapter
from .huginn import HuginnAdapter
from .ouro import OuroAdapter

__all__ = ["DoryAdapter", "HuginnAdapter", "LoopAdapter", "OuroAdapter", "adapter_for", "register_adapter"]
