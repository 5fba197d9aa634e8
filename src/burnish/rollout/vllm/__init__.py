"""vLLM as a generation engine, in a process of its own."""
