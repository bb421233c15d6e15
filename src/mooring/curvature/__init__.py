"""Low-rank adapters, such as LoRA layers, moored through the product of their two factors."""

from mooring.curvature.low_rank import LowRank, register_low_rank
from mooring.curvature.product_factors import Product

__all__ = ["LowRank", "Product", "register_low_rank"]
