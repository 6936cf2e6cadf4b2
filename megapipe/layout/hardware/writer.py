"""Hardware as the text of a file, such as `read_hardware` reads back: the same to six digits."""

from dataclasses import asdict
from typing import Any

import yaml

from megapipe.layout.hardware.description import Hardware


def written(hardware: Hardware, remark: str = "") -> str:
    """YAML text. remark: lines of comment at the top."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in remark.splitlines())
    return head + yaml.safe_dump(_plain(asdict(hardware)), sort_keys=False, width=119, default_flow_style=None)


def _plain(value: Any) -> Any:
    """Lists for tuples, six digits of numbers; without what a file leaves out: None, and lists without rows."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None and each != ()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
