"""LMDeploy: a share of what is free after the weights, by its two engines' rules."""

from kvexp_lmdeploy.engine import Lmdeploy

__all__ = ["Lmdeploy"]
