"""Pure decisions: which rows, which steps, under which names. No tensor, no clock, no file."""
