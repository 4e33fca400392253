"""Checkpoints at rest: import from other formats, integrity checks, and quantized artifacts."""
