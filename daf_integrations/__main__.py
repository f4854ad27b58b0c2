"""`python -m daf_integrations` is the command `daf`."""

from daf_integrations.cli.main import main

if __name__ == "__main__":
    main()
