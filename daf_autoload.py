"""What torch loads of DAF when it is imported: a file of its own, which hands on to `daf_integrations._autoload`.

Torch fails to import where an entry point of its group "torch.backends" does. An editable install leaves DAF's packages
where they are, in a folder that may be deleted. So this file is copied into site-packages by every kind of install, and
goes with `pip uninstall` alone.
"""

from __future__ import annotations

from logging import getLogger


def register() -> None:
    """Installs DAF's hooks. Whatever is missing or broken of the rest of DAF, `import torch` works."""
    try:
        from daf_integrations._autoload import register as register_hooks

        register_hooks()
    except Exception as error:
        getLogger("daf").warning(
            "DAF is installed and cannot be loaded, so no configuration file switches it on: %r. Install it again, or "
            "remove what is left of it: pip uninstall daf-training",
            error,
        )
