"""Mechanics of the study."""
