"""Places that users of the original import from."""
