"""``daf profile``: which module holds how many bytes."""
