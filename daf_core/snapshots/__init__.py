"""What is kept of a training and put back: around what runs beside it, and where a step is run again."""
