"""Write all figures of the documentation, or those that are named; `--list` prints the names."""

import subprocess
import sys
import time

from tests.docs.figures import ROOT, load


def main(names: list[str]) -> int:
    """Write each figure after the one before it, since one page may have several."""
    figures = load()
    if names == ["--list"]:
        print("\n".join(f"{each.name} ({each.tier})" for each in figures.values()))
        return 0
    unknown = set(names) - {*figures, "ptx"}
    if unknown:
        print(f"error: no figure {', '.join(sorted(unknown))}; --list prints all names", file=sys.stderr)
        return 2
    for name in names or figures:
        start = time.monotonic()
        written = []
        for path, text in figures[name].make().items() if name in figures else ():
            if not (ROOT / path).exists() or (ROOT / path).read_text(encoding="utf-8") != text:
                (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
                (ROOT / path).write_text(text, encoding="utf-8")
                written.append(path)
        print(f"{name}: {', '.join(written) or 'unchanged'} ({time.monotonic() - start:.1f} s)", flush=True)
    if not names or "ptx" in names:
        # in a process of its own: Triton's interpreter replaces the compiler before kernels are imported
        return subprocess.run([sys.executable, "-m", "tests.ptx.table"], cwd=ROOT, check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
