"""Continue a prompt with an exported model, using transformers alone.

usage: generate_with_transformers.py FOLDER PROMPT [TEMPERATURE]

TEMPERATURE 0 always takes the most likely token; the default 0.7 samples among the 40 most likely tokens, which reads
better: the most likely continuation of a small model repeats itself. The seed is fixed, so the text is reproducible.
"""

import sys
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, logging, set_seed

NEW_TOKENS = 48
TOP_K = 40


def main(folder: str, prompt: str, temperature: str = "0.7") -> None:
    """Print the prompt and its continuation."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokens = tokenizer(prompt, return_tensors="pt")
    sampling: dict[str, Any] = {"do_sample": True, "temperature": float(temperature), "top_k": TOP_K}
    if float(temperature) == 0:
        sampling = {"do_sample": False}
    set_seed(0)
    texts = model.generate(**tokens, max_new_tokens=NEW_TOKENS, **sampling)
    print(tokenizer.decode(texts[0], skip_special_tokens=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
