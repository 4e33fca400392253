"""The distribution's version, alone in a file so that `setup.py` can read it without importing the package."""

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)
