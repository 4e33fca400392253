"""Corrections of single vLLM behaviours that no plugin reaches; one file each, with its own off-switch and test."""
