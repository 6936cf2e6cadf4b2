"""Functions and classes that no program uses."""

import ast
import re
from collections import Counter

from tests.architecture.source import product, working_tree

CALLED_BY_LIBRARIES = {
    "_fill_text", "_get_default_metavar_for_optional", "_get_help_string",  # argparse and jsonargparse
    "find_class", "persistent_id", "readinto", "seekable",  # pickle and zipfile
    "_loglikelihood_tokens", "eot_token_id", "generate_until", "loglikelihood_rolling", "tok_encode",  # lm-eval
}  # fmt: skip

USED_BY_TESTS_ALONE = {
    "num_pairs": "pairs of a piece of ring attention, for the balance over ranks",
    "rounding_words": "the random numbers that kernels repeat",
    "run_in_process": "a mesh as threads of one process",
}
"""Names that stay although tests alone use them, each with its reason. Nothing may be added."""


def test_no_function_or_class_is_used_by_tests_alone() -> None:
    """Each name occurs in the product outside its definition; special methods do not count."""
    defined = {
        node.name: source.path
        for source in product()
        for node in source.statements
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("__")
        if not any(ast.unparse(each).startswith("schedule(") for each in node.decorator_list)  # used by its name
    }
    programs = working_tree("tools", "examples", "pretrain_gpt.py", "pretrain_bert.py", "setup.py")
    uses = Counter(word for source in (*product(), *programs) for word in re.findall(r"\w+", source.text))
    unused = {name: path for name, path in defined.items() if uses[name] == 1}
    kept = CALLED_BY_LIBRARIES | USED_BY_TESTS_ALONE.keys()
    assert {name: path for name, path in unused.items() if name not in kept} == {}
    assert unused.keys() >= USED_BY_TESTS_ALONE.keys()
