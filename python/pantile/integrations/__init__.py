"""Attention functions for model libraries: ``pantile.integrations.transformers``."""
