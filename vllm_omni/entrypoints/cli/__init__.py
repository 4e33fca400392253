"""The `vllm-omni` command line: one module per subcommand."""
