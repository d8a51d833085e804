"""The seam between the core and a tensor framework: ``base`` says what a backend offers."""
