"""The native core: packed matrix products and whole decoder steps in a C++ library, called through ctypes."""
