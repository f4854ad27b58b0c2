"""`python -m daf_integrations` is the command `daf`."""

from daf_integrations.cli import main

main()
