"""DAF's options on a command line that `transformers.HfArgumentParser` reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from daf_core import DAFConfig
from daf_integrations.session.options import configured, options_in


@dataclass
class DAFArguments:
    """One argument, ``--daf_config``, beside those of `TrainingArguments`, whose ``seed`` `DAFConfig` has, too.

    Example:
        >>> parser = HfArgumentParser((TrainingArguments, DAFArguments))
        >>> args, daf_arguments = parser.parse_args_into_dataclasses()
        >>> callbacks = [DAFCallback(daf_arguments.to_config())]

    Attributes:
        daf_config: A JSON object such as ``{"precision": 4}``, or the path of a YAML or JSON file with the same keys.
    """

    daf_config: str | None = field(
        default=None,
        metadata={"help": "DAF's options: a JSON object such as '{\"precision\": 4}', or a YAML or JSON file of them."},
    )

    def to_config(self) -> DAFConfig:
        """Returns the configuration; without ``--daf_config`` that of the environment, or the defaults.

        Raises:
            ConfigError: It cannot be read, an option is unknown or its value is not allowed.
        """
        if self.daf_config is None:
            return configured()
        if not self.daf_config.lstrip().startswith("{"):
            return DAFConfig.from_yaml(Path(self.daf_config))
        return DAFConfig.from_dict(options_in(self.daf_config, "--daf_config"))
