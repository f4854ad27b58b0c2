"""What pyproject.toml cannot say: editable installs, too, have the file that torch loads."""

from setuptools import Distribution, setup


class _Distribution(Distribution):
    has_data = Distribution.has_data_files  # setuptools asks for this name when it makes an editable wheel


if __name__ == "__main__":
    setup(distclass=_Distribution)
