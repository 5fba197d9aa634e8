"""The generation engine: prompts in, sampled completions with logprobs out."""
