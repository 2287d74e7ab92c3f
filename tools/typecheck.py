"""Does the package type-check, strictly?

    python tools/typecheck.py [mypy arguments]

The package lies in three folders of the checkout: `kernels/` is installed as `graphrt.kernels`, `capture/` as
`graphrt.capture`. mypy knows packages only as they lie on disk, so it gets a folder of links in which they lie as they
are installed; paths in its messages are those of the checkout again. Settings: `[tool.mypy]` in pyproject.toml.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("kernels", "capture")


def link_package(folder: Path) -> None:
    """Lay the package out in `folder` as it is installed, by links into the checkout."""
    package = folder / "graphrt"
    package.mkdir()
    sources = [*(ROOT / "graphrt").iterdir(), *(ROOT / name for name in MAPPED)]
    for source in sources:
        (package / source.name).symlink_to(source)


def main() -> int:
    """mypy's exit status, its messages on standard output."""
    with tempfile.TemporaryDirectory() as name:
        link_package(Path(name))
        command = [
            sys.executable, "-m", "mypy", "-p", "graphrt",
            f"--config-file={ROOT / 'pyproject.toml'}", f"--cache-dir={ROOT / '.mypy_cache'}", *sys.argv[1:],
        ]  # fmt: skip
        # Links outside the working directory keep an installed graphrt from being checked in their place.
        run = subprocess.run(command, cwd=name, env={**os.environ, "MYPYPATH": name}, capture_output=True, text=True)
    print(re.sub(rf"^graphrt/({'|'.join(MAPPED)})/", r"\1/", run.stdout, flags=re.MULTILINE), end="")
    print(run.stderr, end="", file=sys.stderr)
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
