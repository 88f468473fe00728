"""What is drawn: the block diagram and the views, as pure functions from records and recordings."""
