"""Says what ``benchmarks/gpu.sh`` lacks on this machine, before it begins.

The exit status is 0 where all is there, 1 where packages are missing that some parts need, 2 where nothing can be
measured.
"""

import sys
from importlib.util import find_spec

FATAL = {"torch": "torch", "triton": "triton", "numpy": "numpy"}
PARTS = {
    "numba": "numba",
    "psutil": "psutil",
    "click": "click",
    "rich": "rich",
    "sortedcontainers": "sortedcontainers",
    "humanfriendly": "humanfriendly",
    "yaml": "pyyaml",
    "packaging": "packaging",
    "typing_extensions": "typing-extensions",
    "transformers": "transformers>=5.12",
    "peft": "peft>=0.19",
    "accelerate": "accelerate>=1.12",
    "pytest": "pytest>=8.3",
    "hypothesis": "hypothesis>=6.100",
}
"""What to install for each module that may be missing, as in pyproject.toml."""


def missing(packages: dict[str, str]) -> list[str]:
    """Returns what to install of the packages, by module name, that cannot be imported."""
    return [name for module, name in packages.items() if find_spec(module) is None]


def main() -> int:
    """Prints what is missing and how to install it; returns the exit status."""
    fatal = missing(FATAL)
    lacking = fatal + missing(PARTS)
    if lacking:
        names = " ".join(f"'{name}'" for name in lacking)
        print(f"missing: {names}; run: {sys.executable} -m pip install {names}", file=sys.stderr)
    if fatal:
        return 2
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here; run it on a machine that has one", file=sys.stderr)
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
