"""Replies of a model to problems. Uses tasks; `training` and `evaluation` stand above it."""

from helpers.sampling.generate import Reply, prompt_ids, sample
from helpers.sampling.traces import calibration_texts, training_texts

__all__ = ["Reply", "calibration_texts", "prompt_ids", "sample", "training_texts"]
