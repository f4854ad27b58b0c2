"""The tests of trainers that train, and what they are expected to find different with DAF."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """The tests of a peer.

    Attributes:
        paths: Of tests that train, in the folder that they run in.
        folder: That folder, in the checkout.
    """

    paths: tuple[str, ...]
    folder: str = "."


def _files(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/test_{name}.py" for name in names)


SUITES = {
    "transformers": Suite(("tests/trainer",)),
    "accelerate": Suite(_files("accelerator", "grad_sync", "optimizer", "scheduler", "state_checkpointing", "cpu")),
    "peft": Suite(_files("custom_models", "decoder_models", "initialization", "loraplus", "lora_variants", "poly")),
    "lightning": Suite(("tests_pytorch/trainer", "tests_fabric/test_fabric.py"), "tests"),
}

EXPLAINED: dict[str, str] = {
    r"^transformers:.*TrainerCallbackTest::.*Lists differ: \['DAFCallback'": "it lists all callbacks; DAF's is one",
}
"""Why a test fails with DAF, by a regular expression that is found in "peer:precision test: error"."""
