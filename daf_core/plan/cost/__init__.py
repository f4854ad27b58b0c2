"""What each treatment of a block would take."""
