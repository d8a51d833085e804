"""What happens after a run: reading what it wrote. Values in, values out; nothing is printed."""
