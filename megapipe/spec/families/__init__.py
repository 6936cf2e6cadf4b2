"""One file for each family of Hugging Face transformers; `megapipe.spec.family` finds them by itself."""
