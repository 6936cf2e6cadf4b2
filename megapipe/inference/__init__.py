"""Text from trained models: prompts continued by a GPT, gaps filled by a BERT."""
