"""``daf plan``: the plan that a budget gives a model."""
