"""Guide, training and what it led to in one call."""

from npgp.inference.fitted import Inference, infer

__all__ = ["Inference", "infer"]
