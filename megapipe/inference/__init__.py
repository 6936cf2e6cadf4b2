"""Generate text with trained models: a GPT continues prompts, and a BERT fills gaps."""
