"""What `daf bench` does: training steps with DAF and with what one would use instead, side by side."""
