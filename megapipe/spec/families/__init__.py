"""One file for each family of Hugging Face transformers; `megapipe.spec.family` imports all of them."""
