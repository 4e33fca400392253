"""Deploy configuration: files, profiles, model facts and their resolution. Imports neither torch nor vLLM."""
