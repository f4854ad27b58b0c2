"""`daf bench`: training steps with DAF and with the usual alternatives, side by side."""
