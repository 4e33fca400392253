"""Decoder-only language models over packed weights: one stack, one mapping for each family."""
