"""Ways into the engine: Python classes, command line, HTTP server."""
