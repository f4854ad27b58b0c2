"""What lossy storage does to gradients, over torch's operators, modules and losses, and transformers' architectures."""
