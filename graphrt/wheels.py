"""A self-check of the CuTe DSL installation: whether two of its wheels have unpacked different files to one path.

Which of them wins then depends on the order of installation. The symptoms are far away: a TypeError at a compile,
malformed PTX, faults in captured graphs on one family of GPUs.
"""

import base64
import hashlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

PREFIX = "nvidia-cutlass-dsl"


def mixed_wheels(path: Iterable[str] | None = None) -> str:
    """One sentence that names the packages which claim one file with different contents; empty if none do.

    Only files that are claimed twice are read.

    Args:
        path: folders of installed packages; those of this process by default.
    """
    found = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    claims: dict[Path, dict[str, tuple[str, str]]] = {}
    for one in found:
        name = (one.metadata["Name"] or "").lower().replace("_", "-")
        if not name.startswith(PREFIX):
            continue
        for file in one.files or ():
            if file.hash is not None:
                claims.setdefault(Path(str(file.locate())), {})[name] = (file.hash.mode, file.hash.value)
    for file_path, by_package in sorted(claims.items()):
        if len(set(by_package.values())) > 1:
            packages, owner = " and ".join(sorted(by_package)), _owner(file_path, by_package)
            return (
                f"{packages} both install {file_path.name}, with different contents, and {owner} is there: "
                "uninstall all of them, then install one"
            )
    return ""


def _owner(path: Path, claims: dict[str, tuple[str, str]]) -> str:
    """Whose file it is."""
    for name, (mode, value) in sorted(claims.items()):
        if path.is_file():
            digest = base64.urlsafe_b64encode(hashlib.new(mode, path.read_bytes()).digest())
            if digest.rstrip(b"=").decode() == value:
                return f"that of {name}"
    return "neither's file"
