"""The ``msmon`` command: parses, calls the library, shows what comes back."""
