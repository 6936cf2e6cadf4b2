"""Continues a prompt with an exported model, by transformers alone: `generate_with_transformers.py FOLDER PROMPT`."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, logging

NEW_TOKENS = 48


def main(folder: str, prompt: str) -> None:
    """Print the prompt with the likeliest tokens behind it."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**tokens, max_new_tokens=NEW_TOKENS, do_sample=False)
    print(tokenizer.decode(found[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
