"""Hardware platforms: what vLLM asks of a device, answered for the edge."""
