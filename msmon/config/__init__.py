"""The configuration: what it means (schema), how it is read (load), what this version can do (availability)."""
