"""What leaves the training thread: the table of one training step."""
