"""Low-rank adapters, such as LoRA layers, moored through the product of their two factors."""

from mooring.curvature.low_rank import LowRank, Product

__all__ = ["LowRank", "Product"]
