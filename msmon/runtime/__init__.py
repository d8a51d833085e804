"""What runs while a training runs: guard, ledger, writer thread, run directory, the end of the process."""
