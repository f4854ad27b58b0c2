"""The environment variables that switch DAF on. Standard library only: `import torch` loads this file."""

from __future__ import annotations

import os

SWITCH = "ACCELERATE_USE_DAF"  # environment variable that switches DAF on in Accelerate
OPTIONS = "ACCELERATE_DAF_CONFIG"  # environment variable with the options, as a JSON object
SECTION = "daf_config"  # section of an Accelerate configuration file with the options

_OFF = ("", "0", "false", "off", "no", "n", "f")


def requested() -> bool:
    """Says whether the environment switches DAF on in Accelerate."""
    return os.environ.get(SWITCH, "").lower() not in _OFF


def autoload_allowed() -> bool:
    """Says whether torch may install DAF's hooks: ``DAF_AUTOLOAD=0`` leaves them out."""
    return os.environ.get("DAF_AUTOLOAD", "1").lower() not in _OFF
