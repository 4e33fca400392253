"""Models that this package computes itself inside vLLM's engine."""
