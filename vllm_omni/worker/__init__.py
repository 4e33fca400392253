"""Workers: load the model, hold the KV cache, run one step."""
