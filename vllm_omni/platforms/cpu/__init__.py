"""The CPU platform: one process, explicit memory, threads set before torch is imported."""
