"""Replies of a model to problems. Uses tasks; `training` and `evaluation` stand above it."""

from helpers.sampling.generate import Reply, sample

__all__ = ["Reply", "sample"]
