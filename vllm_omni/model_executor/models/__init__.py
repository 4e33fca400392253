"""One folder for each model family that has its own code."""
