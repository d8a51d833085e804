"""One short file a subcommand: parse, call the library, render."""
