"""Sources of questions and answers, prompt templates, tokenizers, a resumable Grain pipeline."""
