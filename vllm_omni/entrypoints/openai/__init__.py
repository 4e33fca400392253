"""The OpenAI-compatible HTTP server on vLLM's serving classes."""
